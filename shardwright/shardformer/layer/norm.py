"""Norms in one kernel, which `kernels.norms` chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ...kernels import norms
from .parallel_module import ParallelGroup, ParallelModule, combined_class, native_class, own_forward
from .wide_norm import NormOverRanks


class _Norm(ParallelModule):
    """Norms that are made from those that exist."""

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        native = "nn.RMSNorm" if "RMS" in name else "nn.LayerNorm"
        raise ValueError(
            f"{name} is not built by itself: build the norm, and give it to {name}.from_native_module({native}(8))"
        )


class FusedLayerNorm(_Norm):
    """A layer norm. torch's own is one kernel already: a native one stays where no other kernel is there for it (see
    `kernels.norms`).
    """

    eps: float
    weight: Tensor
    bias: Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_one_tensor(args, kwargs, self.weight) or torch.is_autocast_enabled(args[0].device.type):
            return super().forward(*args, **kwargs)
        return norms.layer_norm(args[0], self.weight, self.bias, self.eps)

    @classmethod
    def _from_native(cls, module: nn.Module, parallel: ParallelGroup) -> nn.Module:
        if not isinstance(module, nn.LayerNorm):
            raise ValueError(f"{cls.__name__} takes nn.LayerNorm, not {type(module).__name__}")
        return cls.adopt(module, parallel) if norms.has_layer_norm() and is_plain_layer_norm(module) else module


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
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) in one kernel; x [..., H], weight [H], offset 0 or 1.

    Takes any module that computes just this. Other variants (no weight, other dims) are recognised by trying, and
    refused. What else a norm may be called with (a gate, a residual), and tensors of another dtype than its weight, go
    to its own forward: families differ in what they round, and to what.
    """

    offset: float = 0.0
    weight: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_one_tensor(args, kwargs, self.weight) or _is_cast(self, args[0]):
            return super().forward(*args, **kwargs)
        return norms.rms_norm(args[0], self.weight, epsilon_of(self), self.offset)

    @classmethod
    def _from_native(cls, module: nn.Module, parallel: ParallelGroup) -> nn.Module:
        offset = rms_offset(module)
        if offset is None:
            raise ValueError(
                f"FusedRMSNorm takes modules that compute x / rms(x) * weight, which {type(module).__name__} does not"
            )
        layer = cls.adopt(module, parallel)
        layer.offset = offset
        return layer


def _is_one_tensor(args: tuple[Any, ...], kwargs: Any, weight: Tensor) -> bool:
    """Whether a norm is called as it was tried."""
    return len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype == weight.dtype


def _is_cast(module: nn.Module, x: Tensor) -> bool:
    """Whether autocast decides in which dtype torch's own norm computes."""
    return isinstance(module, nn.RMSNorm) and torch.is_autocast_enabled(x.device.type)


def rms_offset(module: nn.Module) -> float | None:
    """Of an RMS norm with one weight, what is added to the weight, 0 or 1, found by comparing a copy of it on random
    numbers; None of any other module, and of one whose features are dealt to ranks.
    """
    weight: Any = getattr(module, "weight", None)
    epsilon: Any = epsilon_of(module)
    if (
        "RMSNorm" not in native_class(module).__name__
        or not isinstance(epsilon, float)
        or isinstance(module, NormOverRanks)  # of features that other ranks have
        or list(module._parameters) != ["weight"]
        or not isinstance(weight, Tensor)
        or weight.ndim != 1
    ):
        return None
    generator = torch.Generator().manual_seed(0)
    random = partial(torch.randn, generator=generator, device="cpu")
    trial = object.__new__(type(module))
    trial.__dict__.update(module.__dict__)
    trial_weight = nn.Parameter(random(weight.shape))
    trial._parameters = {"weight": trial_weight}
    # epsilon counts where numbers are small, and may be in another place than here
    trials = [size * random(2, 3, weight.shape[0]) for size in (1.0, epsilon**0.5)]
    slopes = random(2, 3, weight.shape[0])

    def tried(norm: Callable[[Tensor], Any]) -> list[Tensor]:
        """Outputs and all gradients, in training and in evaluation."""
        found = []
        for trial.training in (True, False):
            for numbers in trials:
                x = numbers.clone().requires_grad_()
                y = norm(x)
                found += [y.detach(), *torch.autograd.grad(y, [x, trial_weight], slopes)]
        return found

    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        try:
            got = tried(trial)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        for offset in (0.0, 1.0):
            wanted = tried(lambda x: F.rms_norm(x, weight.shape, trial_weight + offset, epsilon))  # noqa: B023
            if all(_is_close(one, other) for one, other in zip(got, wanted, strict=True)):
                return offset
    return None


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-5 * other.abs().max())


def is_plain_layer_norm(module: nn.Module) -> bool:
    """Whether a module is torch's layer norm over one dim, with a weight."""
    return (
        isinstance(module, nn.LayerNorm)
        and own_forward(module) is nn.LayerNorm.forward
        and len(module.normalized_shape) == 1
        and module.weight is not None
    )


def has_fusable_norms(model: nn.Module) -> bool:
    kinds = {type(module): module for module in model.modules() if "RMSNorm" in type(module).__name__}
    if any(rms_offset(module) is not None for module in kinds.values()):
        return True
    return norms.has_layer_norm() and any(map(is_plain_layer_norm, model.modules()))


def fuse_norms(model: nn.Module) -> int:
    """Fuse every norm of a model that can be, in place; returns how many."""
    count = 0
    kinds: dict[Any, float | None] = {}
    for module in model.modules():
        kind = type(module)
        if isinstance(module, ParallelModule) and not isinstance(module, _Norm):
            continue  # computes over the features of several ranks
        if "RMSNorm" in kind.__name__:
            alike = kind, *_settings(module)
            if alike not in kinds:
                kinds[alike] = rms_offset(module)
            offset = kinds[alike]
            if offset is not None:
                module.__class__ = combined_class(FusedRMSNorm, kind)
                module.offset = offset  # type: ignore[assignment]
                count += 1
        elif norms.has_layer_norm() and is_plain_layer_norm(module):
            module.__class__ = combined_class(FusedLayerNorm, kind)
            count += 1
    return count


def _settings(module: nn.Module) -> Iterator[Any]:
    """What two modules of a class that compute the same have in common."""
    for name, value in sorted(vars(module).items()):
        if value is None or isinstance(value, bool | int | float | str | tuple):
            yield name, value
    for name, parameter in module._parameters.items():
        yield name, None if parameter is None else parameter.shape


def epsilon_of(module: nn.Module) -> float:
    return getattr(module, "variance_epsilon", getattr(module, "eps", getattr(module, "epsilon", None)))  # type: ignore[return-value]
