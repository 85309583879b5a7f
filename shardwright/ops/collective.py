"""Collectives over one group as autograd functions on local tensors.

Every function is named by what it does to the data in forward; its backward is the adjoint for the situation named in
its docstring. `x` is this rank's tensor, n the size of `group`, k this rank's coordinate in it. A group of one costs
nothing: the input comes back as it is.

No function writes to its input or to the gradient it is given: autograd may have saved the first and may share the
second with other branches of the graph. In-place collectives act on tensors that the function itself has just made, so
activation checkpointing can recompute them; torch's selective checkpointing must never *save* the output of a
collective (`c10d` ops mutate their argument, and a saved result would not be mutated again when the region is
recomputed). The regions of `ops.keeping` keep the results of forwards.

Sizes: `sizes` lists the length of every rank's part along `dim`, in the order of the ranks. Without it, parts are as
`torch.tensor_split` deals them when a whole tensor is split, and equal to this rank's own when parts are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import turns
from ..comm.collectives import (
    all_gather,
    all_reduce_in_place,
    all_to_all_even,
    all_to_all_flat,
    even_sizes,
    reduce_scatter,
)
from .keeping import keep_result

Sizes = Sequence[int]


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Hand a replicated `x` to consumers that each compute a part of the result.

    forward   y = x
    backward  dx = sum over ranks of dy
    """
    return x if group.size() == 1 else _Copy.apply(x, group)


def copy_all_to_group(xs: Sequence[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    """`copy_to_group` of several tensors that the same consumers take.

    forward   y_i = x_i
    backward  dx_i = sum over ranks of dy_i, one all-reduce for all of one dtype
    """
    return tuple(xs) if group.size() == 1 else cast(tuple[Tensor, ...], _CopyAll.apply(group, *xs))


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' partial results to a replicated one.

    forward   y = sum over ranks of x
    backward  dx = dy
    """
    return x if group.size() == 1 else _Reduce.apply(x, group)


def gather_from_group(x: Tensor, group: dist.ProcessGroup, dim: int = -1, sizes: Sizes | None = None) -> Tensor:
    """Concatenate the ranks' parts for consumers that all compute the same (replicated consumers).

    forward   y = concat over ranks of x along dim                [..., s_k, ...] -> [..., sum(s), ...]
    backward  dx = dy[..., own part, ...]
    """
    return x if group.size() == 1 else _Gather.apply(x, group, dim, _gather_sizes(x, group, dim, sizes), False)


def gather_for_shards(x: Tensor, group: dist.ProcessGroup, dim: int = 0, sizes: Sizes | None = None) -> Tensor:
    """Concatenate the ranks' parts for consumers that each compute a part of the result (sharded consumers).

    forward   y = concat over ranks of x along dim                [..., s_k, ...] -> [..., sum(s), ...]
    backward  dx = (sum over ranks of dy)[..., own part, ...]     a reduce-scatter
    """
    return x if group.size() == 1 else _Gather.apply(x, group, dim, _gather_sizes(x, group, dim, sizes), True)


def split_to_group(x: Tensor, group: dist.ProcessGroup, dim: int = -1, sizes: Sizes | None = None) -> Tensor:
    """Keep this rank's part of a replicated `x`.

    forward   y = x[..., own part, ...]                           [..., S, ...] -> [..., s_k, ...]
    backward  dx = concat over ranks of dy along dim
    """
    return x if group.size() == 1 else _Split.apply(x, group, dim, _split_sizes(x, group, dim, sizes))


def reduce_scatter_to_group(x: Tensor, group: dist.ProcessGroup, dim: int = 0, sizes: Sizes | None = None) -> Tensor:
    """Sum the ranks' partial results and keep this rank's part of the sum.

    forward   y = (sum over ranks of x)[..., own part, ...]       [..., S, ...] -> [..., s_k, ...]
    backward  dx = concat over ranks of dy along dim
    """
    return x if group.size() == 1 else _ReduceScatter.apply(x, group, dim, _split_sizes(x, group, dim, sizes))


def all_to_all_in_group(
    x: Tensor,
    group: dist.ProcessGroup,
    scatter_dim: int,
    gather_dim: int,
    scatter_sizes: Sizes | None = None,
    gather_sizes: Sizes | None = None,
) -> Tensor:
    """Trade a tensor sharded along `gather_dim` for one sharded along `scatter_dim`.

    forward   y = concat over ranks r along gather_dim of x_r[..., own part along scatter_dim, ...]
              [..., S, ..., g_k, ...] -> [..., s_k, ..., sum(g), ...]
    backward  the same with scatter and gather exchanged
    """
    if group.size() == 1:
        return x
    scatter_sizes = _split_sizes(x, group, scatter_dim, scatter_sizes)
    gather_sizes = _gather_sizes(x, group, gather_dim, gather_sizes)
    return _AllToAll.apply(x, group, scatter_dim, gather_dim, scatter_sizes, gather_sizes)


# --- the same on raw tensors, without autograd ---


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """The ranks' sum in a fresh contiguous tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    if op == dist.ReduceOp.SUM:
        turns.run(all_reduce_in_place, total, group=group)
    else:
        turns.run(dist.all_reduce, total, op=op, group=group)
    return total


def all_to_all(
    x: Tensor, group: dist.ProcessGroup, scatter_dim: int, gather_dim: int, scatter_sizes: Sizes, gather_sizes: Sizes
) -> Tensor:
    """See `all_to_all_in_group`; parts travel flattened, so any sizes do."""
    shapes = []
    for size in gather_sizes:
        shape = list(x.shape)
        shape[gather_dim], shape[scatter_dim] = size, scatter_sizes[group.rank()]
        shapes.append(shape)
    counts = [torch.Size(shape).numel() for shape in shapes]
    if len(set(scatter_sizes)) == len(set(counts)) == 1:
        received = all_to_all_even(x, group, scatter_dim % x.ndim)
    else:
        sent = [part.reshape(-1) for part in x.split(list(scatter_sizes), scatter_dim)]
        received = all_to_all_flat(sent, counts, group)
    return torch.cat([part.view(shape) for part, shape in zip(received, shapes, strict=True)], gather_dim)


def own_part(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
    """This rank's part of a whole tensor, contiguous and in its own memory, so that the whole can be freed."""
    rank = group.rank()
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)


def _split_sizes(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes | None) -> Sizes:
    if sizes is None:
        return even_sizes(x.shape[dim], group.size())
    if len(sizes) != group.size() or sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"sizes={list(sizes)} must give one length for each of {group.size()} ranks and sum to "
            f"{x.shape[dim]} (dim {dim})"
        )
    return sizes


def _gather_sizes(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes | None) -> Sizes:
    if sizes is None:
        return [x.shape[dim]] * group.size()
    if len(sizes) != group.size() or sizes[group.rank()] != x.shape[dim]:
        raise ValueError(
            f"sizes={list(sizes)} must give one length for each of {group.size()} ranks, "
            f"and {x.shape[dim]} for rank {group.rank()} (dim {dim})"
        )
    return sizes


# [Note: gradients of gradients]
# Backward is made of the same functions: the adjoint of copying is reducing, that of gathering for replicated consumers
# is splitting, and so on. With `create_graph=True`, which is when gradients are recorded in backward, it calls these,
# so that derivatives of any order are right; else it computes the same without autograd.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return (reduce_from_group(dy, ctx.group) if torch.is_grad_enabled() else all_reduce(dy, ctx.group)), None


class _CopyAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        # aliases, but not views: who postpones the weight gradient of a view adds it to the parameter it is a view of
        return tuple(x.detach() for x in xs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [dy for dy in dys if dy is not None]
        summed: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dy.dtype for dy in there):
            alike = [dy for dy in there if dy.dtype == dtype]
            flat = torch.cat([dy.reshape(-1) for dy in alike])
            total = reduce_from_group(flat, ctx.group) if torch.is_grad_enabled() else all_reduce(flat, ctx.group)
            parts = total.split([dy.numel() for dy in alike])
            summed |= {id(dy): part.view(dy.shape) for dy, part in zip(alike, parts, strict=True)}
        return (None, *(None if dy is None else summed[id(dy)] for dy in dys))


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return cast(Tensor, keep_result(lambda: all_reduce(x, group)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return (copy_to_group(dy, ctx.group) if torch.is_grad_enabled() else dy), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes, sum_gradients: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes, ctx.sum_gradients = group, dim, sizes, sum_gradients
        return cast(Tensor, keep_result(lambda: all_gather(x, group, dim, sizes)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            recorded = reduce_scatter_to_group if ctx.sum_gradients else split_to_group
            return recorded(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None, None
        part = reduce_scatter if ctx.sum_gradients else own_part
        return part(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return own_part(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gathered = gather_from_group if torch.is_grad_enabled() else all_gather
        return gathered(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return cast(Tensor, keep_result(lambda: reduce_scatter(x, group, dim, sizes)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gathered = gather_for_shards if torch.is_grad_enabled() else all_gather
        return gathered(dy, ctx.group, ctx.dim, ctx.sizes), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: dist.ProcessGroup,
        scatter_dim: int,
        gather_dim: int,
        scatter_sizes: Sizes,
        gather_sizes: Sizes,
    ) -> Tensor:
        ctx.group, ctx.dims, ctx.sizes = group, (scatter_dim, gather_dim), (scatter_sizes, gather_sizes)
        return cast(
            Tensor, keep_result(lambda: all_to_all(x, group, scatter_dim, gather_dim, scatter_sizes, gather_sizes))
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (scatter_dim, gather_dim), (scatter_sizes, gather_sizes) = ctx.dims, ctx.sizes
        trade = all_to_all_in_group if torch.is_grad_enabled() else all_to_all
        return trade(dy, ctx.group, gather_dim, scatter_dim, gather_sizes, scatter_sizes), None, None, None, None, None
