"""The wrappers that boosting returns."""

from .loss_guard import LossGuard, NonFiniteLoss
from .model import ModelWrapper
from .optimizer import OptimizerWrapper

__all__ = ["LossGuard", "ModelWrapper", "NonFiniteLoss", "OptimizerWrapper"]
