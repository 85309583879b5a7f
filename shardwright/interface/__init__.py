"""The wrappers that boosting returns."""

from .model import ModelWrapper
from .optimizer import OptimizerWrapper

__all__ = ["ModelWrapper", "OptimizerWrapper"]
