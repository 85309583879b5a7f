"""Which weight gradients of a model can wait, and letting them: for schedules that split the backward pass (zero
bubble).

    linears, Conv1D            `ops.linear.linear` stands in for their forward; sharded ones use it anyway
    modules with parameters    of two or more dims that they multiply with in their own forward (experts, routers,
                               embeddings, heads of
    of their own               their own kind) run it under `ops.postponed.PostponeWeightGrads`
    convolutions, norms        compute their gradients at once, as do functions that nobody knows
    compiled layers            leave the products of their backward graphs (`ops.late_products`)

Modules keep their identity, names and parameters; their class becomes a subclass of what it was.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.linear import linear
from ..ops.postponed import PostponeWeightGrads
from .layer.linear import ColumnParallel, RowParallel, computes_plainly, is_conv1d, is_linear
from .layer.parallel_module import ParallelModule, combined_class

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class _PostponingLinear(nn.Module):
    weight: Tensor
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _PostponingConv1D(nn.Module):
    weight: Tensor
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, transposed=True)


class _PostponingProducts(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if torch.compiler.is_compiling() else PostponeWeightGrads():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def can_wait(module: nn.Module) -> bool:
    """Whether the weight gradients of the parameters that `module` itself holds can be computed later."""
    return _uses_our_linear(module) or _is_plain(module) or _multiplies(module)


def let_weight_grads_wait(model: nn.Module) -> None:
    """Let the modules of `model` leave weight gradients to an active `WeightGradStore`. Sharding comes first."""
    for module in model.modules():
        if _uses_our_linear(module):
            continue
        if _is_plain(module):
            module.__class__ = combined_class(
                _PostponingConv1D if is_conv1d(module) else _PostponingLinear, type(module)
            )
        elif _multiplies(module):
            module.__class__ = combined_class(_PostponingProducts, type(module))


def _uses_our_linear(module: nn.Module) -> bool:
    return isinstance(module, ColumnParallel | RowParallel) and computes_plainly(module)


def _is_plain(module: nn.Module) -> bool:
    return is_linear(module) and computes_plainly(module) and not isinstance(module, ParallelModule)


def _multiplies(module: nn.Module) -> bool:
    return not isinstance(module, _CONVOLUTIONS) and any(param.dim() >= 2 for param in module.parameters(recurse=False))
