"""Collectives of tensor-parallel layers as operators that torch.compile keeps in one graph.

What eager code does around them (attributes on tensors, weak references, nodes of autograd that wait for one another)
ends a graph each time. In a graph there is none of it: an operator of a tensor and the name of a group, with its
gradient.

    copy_in     forward  y = x                          backward  dx = sum over ranks of dy
    sum_out     forward  y = sum over ranks of x        backward  dx = dy
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..comm.collectives import all_reduce_in_place

_groups: dict[str, dist.ProcessGroup] = {}  # an operator takes no process group, so it finds it by its name


def name_of(group: dist.ProcessGroup) -> str:
    """The name under which the operators find `group`; ask for it before anything is compiled."""
    name = str(group.group_name)
    _groups[name] = group
    return name


@torch.library.custom_op("shardwright::sum_over_group", mutates_args=())
def _sum(x: Tensor, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    all_reduce_in_place(total, _groups[group])
    return total


@torch.library.custom_op("shardwright::copy_to_group", mutates_args=())
def _copy(x: Tensor, group: str) -> Tensor:
    return x.clone()


@_sum.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


@_copy.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


_sum.register_autograd(lambda ctx, dy: (dy, None), setup_context=_keep_group)
_copy.register_autograd(lambda ctx, dy: (_sum(dy, ctx.group), None), setup_context=_keep_group)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """See `ops.linear.column_linear`. Linears on one input reduce its gradient each for itself."""
    return F.linear(_copy(x, group), weight.t() if transposed else weight, bias)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """See `ops.linear.row_linear`."""
    y = _sum(F.linear(x, weight.t() if transposed else weight), group)
    return y if bias is None else y + bias.to(y.dtype)
