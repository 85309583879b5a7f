"""Gather and scatter along the sequence in one part for each rank, so that products run beside what is under way.

    gather   every rank's part is broadcast. The first column linear multiplies each part as it comes, its own first:
             y[part r] = x_r W^T. The others find all of them.
    scatter  y[part r] = sum over ranks of (x W^T)[part r], reduced to rank r while the next part is multiplied
             backward: dy_r is broadcast, dx[part r] = dy_r W as it comes

The bytes are those of one all-gather and one reduce-scatter, whatever the parts.

[Note: a tensor that is on its way]

A module is given X before all of it is there, and may do with it what it likes. So X is of a class of its own: what
only asks for its shape goes on, a column linear takes the parts, and any other operation waits for them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import new_class
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..comm import turns
from ..comm.compat import without_torch_function
from .collective import Sizes, gather_for_shards
from .keeping import keep_result

_FACTS = frozenset(
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "requires_grad", "grad_fn", "is_meta", "ndim", "layout", "_version")
) | {Tensor.size, Tensor.dim, Tensor.numel}


class Parts:
    """Parts of X [.., S, I] that are on their way to this rank; rank r's lie in `buffers[r]`.

    memory  for X
    """

    def __init__(self, x: Tensor, memory: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> None:
        self.dim, self.sizes, self.own = dim, sizes, group.rank()
        self.memory = memory.data  # with a version of its own: nobody has read what is written later
        ranks = dist.get_process_group_ranks(group)
        self.buffers = [x.contiguous() if rank == self.own else _like(x, dim, size) for rank, size in enumerate(sizes)]
        self._works = [
            dist.broadcast(buffer, src=ranks[rank], group=group, async_op=True)
            for rank, buffer in enumerate(self.buffers)
        ]
        self.is_complete = False

    def in_order(self) -> list[int]:
        """This rank's own part, and then those of the others as they were sent."""
        return [self.own, *(rank for rank in range(len(self.sizes)) if rank != self.own)]

    def wait(self, rank: int) -> Tensor:
        work = self._works[rank]
        if work is not None:
            turns.wait(work, self.buffers[rank])
            self._works[rank] = None
        return self.buffers[rank]

    def fill(self) -> None:
        """Write X to the memory that has been made for it."""
        if not self.is_complete:
            self.is_complete = True
            with torch.no_grad(), without_torch_function():
                for rank, part in enumerate(self.memory.split(list(self.sizes), self.dim)):
                    part.copy_(self.wait(rank))
            self.buffers = []


class Arriving(Tensor):
    """X of which parts may be missing; see [Note: a tensor that is on its way]."""

    parts: Parts

    @classmethod
    def of(cls, whole: Tensor, parts: Parts) -> Arriving:
        """`whole` as autograd knows it."""
        with without_torch_function():
            arriving = _as(whole, cls)
        arriving.parts = parts
        return arriving

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_torch_function():
            if func not in _FACTS:
                for value in (*args, *(kwargs or {}).values()):
                    for one in value if isinstance(value, list | tuple) else (value,):
                        if isinstance(one, cls):
                            one.parts.fill()
            return func(*args, **(kwargs or {}))


def _as(whole: Tensor, cls: type[Arriving]) -> Arriving:
    """An alias of `whole` that is of `cls`, too."""
    own = type(whole)
    if not hasattr(own, "__torch_dispatch__") or own.__torch_dispatch__ is Tensor.__torch_dispatch__:
        return whole.as_subclass(cls)
    # A class with a dispatch of its own, as tensors without memory have, stays what it is beside: torch makes no alias
    # of it that is of a class it is no base of.
    alias = whole.view_as(whole)
    alias.__class__ = _both(cls, own)
    return cast(Arriving, alias)


@cache
def _both(cls: type[Arriving], own: type[Tensor]) -> type[Tensor]:
    return new_class(f"{cls.__name__}{own.__name__}", (cls, own))


def finish(x: Tensor) -> None:
    """Wait for what is missing of x, if it may be."""
    if isinstance(x, Arriving):
        x.parts.fill()


def start_gather(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> tuple[Tensor, Parts]:
    """Memory for X, and the parts that will fill it."""
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    memory = x.new_empty(shape)
    return memory, Parts(x, memory, group, dim, sizes)


def product_of_parts(parts: Parts, weight: Tensor, bias: Tensor | None) -> Tensor:
    """X W^T + b, each part multiplied as it comes."""
    found: list[Tensor | None] = [None] * len(parts.sizes)
    for rank in parts.in_order():
        found[rank] = F.linear(parts.wait(rank).to(weight.dtype), weight, bias)
    return torch.cat(cast(list[Tensor], found), parts.dim)


def deal_products(x: Tensor, weight: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    """This rank's part of the sum over ranks of x W^T, reduced to each while the product of the next is computed."""
    ranks = dist.get_process_group_ranks(group)
    works, summands = [], []
    for rank, part in enumerate(x.split(list(sizes), dim)):
        summand = F.linear(part, weight).contiguous()
        works.append(dist.reduce(summand, dst=ranks[rank], group=group, async_op=True))
        summands.append(summand)
    for work, summand in zip(works, summands, strict=True):
        if work is not None:
            turns.wait(work, summand)
    return summands[group.rank()]


def scattered_linear(x: Tensor, weight: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    """This rank's part along `dim` of the sum over ranks of x W^T; x [.., S, i], W [O, i] -> [.., s_k, O]."""
    return cast(Tensor, _ScatteredLinear.apply(x, weight, group, dim, sizes))


class _ScatteredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes

        return cast(Tensor, keep_result(lambda: deal_products(x, weight, group, dim, sizes)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():  # see [Note: gradients of gradients] in `ops.collective`
            whole = gather_for_shards(dy, ctx.group, ctx.dim, ctx.sizes)
            dw = whole.reshape(-1, whole.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
            return whole @ weight, dw, None, None, None
        memory, parts = start_gather(dy.contiguous(), ctx.group, ctx.dim, ctx.sizes)
        dx = product_of_parts(parts, weight.t(), None) if need_x else None
        dw = None
        if need_weight:
            parts.fill()
            dw = memory.reshape(-1, memory.shape[-1]).t().mm(x.reshape(-1, x.shape[-1]))
        return dx, dw, None, None, None


def _like(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)
