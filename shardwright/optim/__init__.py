"""Optimizers under the names scripts know, and what sharding has to know about any optimizer."""

from .adam import CPUAdam, FusedAdam, HybridAdam

__all__ = ["CPUAdam", "FusedAdam", "HybridAdam"]
