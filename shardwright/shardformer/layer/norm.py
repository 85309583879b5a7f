"""Norms through torch's fused kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .parallel_module import ParallelGroup, ParallelModule, combined_class, native_class


class _Norm(ParallelModule):
    """Norms that are made from those that exist."""

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        native = "nn.RMSNorm" if "RMS" in name else "nn.LayerNorm"
        raise ValueError(
            f"{name} is not built by itself: build the norm, and give it to {name}.from_native_module({native}(8))"
        )


class FusedLayerNorm(_Norm):
    """A layer norm. torch's own is one kernel already, so a native one is only checked and returned."""

    @classmethod
    def _from_native(cls, module: nn.Module, parallel: ParallelGroup) -> nn.Module:
        if not isinstance(module, nn.LayerNorm):
            raise ValueError(f"{cls.__name__} takes nn.LayerNorm, not {type(module).__name__}")
        return module


class LayerNorm(FusedLayerNorm):
    """The same: a layer norm stays as it is."""


class RMSNorm(_Norm):
    """An RMS norm stays as it is."""

    @classmethod
    def _from_native(cls, module: nn.Module, parallel: ParallelGroup) -> nn.Module:
        if any(param.ndim > 1 for param in module.parameters()):
            raise ValueError(f"{cls.__name__} takes RMS norms, not {type(module).__name__}")
        return module


class FusedRMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight in one kernel; x [..., H], weight [H].

    Takes any module that computes just this. Variants (weight + 1, no weight, other dims) are recognised by trying, and
    refused.
    """

    epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)  # type: ignore[arg-type]

    @classmethod
    def _from_native(cls, module: nn.Module, parallel: ParallelGroup) -> nn.Module:
        if not is_rms_norm(module):
            raise ValueError(
                f"FusedRMSNorm takes modules that compute x / rms(x) * weight, which {type(module).__name__} does not"
            )
        layer = cls.adopt(module, parallel)
        layer.epsilon = _epsilon(module)
        return layer


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMS norm with one weight, found by comparing a copy of it on random numbers."""
    weight: Any = getattr(module, "weight", None)
    if (
        "RMSNorm" not in native_class(module).__name__
        or _epsilon(module) is None
        or list(module._parameters) != ["weight"]
        or weight.ndim != 1
    ):
        return False
    trial = object.__new__(type(module))
    trial.__dict__.update(module.__dict__)
    generator = torch.Generator().manual_seed(0)
    trial_weight = nn.Parameter(torch.randn(weight.shape, generator=generator))
    trial._parameters = {"weight": trial_weight}
    x = torch.randn(2, 3, weight.shape[0], generator=generator)
    with torch.no_grad():
        try:
            y = trial(x)
        except (RuntimeError, TypeError, ValueError):
            return False
        return isinstance(y, Tensor) and torch.allclose(
            y, F.rms_norm(x, weight.shape, trial_weight, _epsilon(module)), atol=1e-5
        )


def has_fusable_norms(model: nn.Module) -> bool:
    kinds = {type(module): module for module in model.modules() if "RMSNorm" in type(module).__name__}
    return any(map(is_rms_norm, kinds.values()))


def fuse_norms(model: nn.Module) -> int:
    """Fuse every RMS norm of a model in place; returns how many."""
    count = 0
    kinds: dict[type, bool] = {}
    for module in model.modules():
        kind = type(module)
        if "RMSNorm" in kind.__name__ and kinds.setdefault(kind, is_rms_norm(module)):
            module.__class__ = combined_class(FusedRMSNorm, kind)
            module.epsilon = _epsilon(module)  # type: ignore[assignment]
            count += 1
    return count


def _epsilon(module: nn.Module) -> float:
    return getattr(module, "variance_epsilon", getattr(module, "eps", getattr(module, "epsilon", None)))  # type: ignore[return-value]
