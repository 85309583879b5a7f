"""The facade a training script talks to."""

from .booster import Booster
from .mixed_precision import BF16MixedPrecision, FP16MixedPrecision, MixedPrecision

__all__ = ["BF16MixedPrecision", "Booster", "FP16MixedPrecision", "MixedPrecision"]
