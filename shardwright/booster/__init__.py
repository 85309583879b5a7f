"""The facade a training script talks to."""

from __future__ import annotations

from typing import Any

from .._moved import missing_name
from .booster import Booster
from .mixed_precision import BF16MixedPrecision, FP16MixedPrecision, MixedPrecision

__all__ = ["BF16MixedPrecision", "Booster", "FP16MixedPrecision", "MixedPrecision"]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
