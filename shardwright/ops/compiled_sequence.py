"""Gathering and dealing out along the sequence, as operators that torch.compile keeps in one graph.

With S positions, of which rank k holds s_k, as `ops.sequence` does them in eager layers:

    gather_sequence     forward  X = all of x           [B, s_k, H] -> [B, S, H]    backward  dx = own part of dX
                        for_shards: its readers each compute a part                 dx = own part of the sum of dX
    scatter_sequence    forward  y = own part of the sum of x                       backward  dx = all of dy
    split_sequence      forward  y = own part of x                                  backward  dx = all of dy

A gather of which column linears take a copy is two (`read_by_shards`): one whose gradient is a reduce-scatter for them,
one for whoever else reads X. In the graphs of autograd they are one again (`share_gathers`).

How long the sequences are is an argument of the graph, `traced.length`, None where nothing is split.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..comm.collectives import all_gather, even_sizes, reduce_scatter
from .collective import own_part
from .compiled import calls, group_of


class Traced:
    """What modules ask for while a graph is traced.

    keys    how long the sequence is that the attention which is traced makes keys of
    """

    length: int | None = None
    keys: int | None = None


traced = Traced()


def no_graph(reason: str) -> None:
    """Let torch.compile give up here (checked on torch 2.13)."""
    torch._dynamo.graph_break(msg=reason)


@torch.library.custom_op("shardwright::gather_sequence", mutates_args=())
def _gather(
    x: Tensor,
    group: str,
    dim: int,
    length: int,
    for_shards: bool,
    again: bool,
    in_parts: bool,
    after: Tensor | None = None,
) -> Tensor:
    """`again` and `in_parts` are for linears that read what is gathered, see `compiled_products`."""
    members = group_of(group)
    return all_gather(x.contiguous(), members, dim, even_sizes(length, members.size())).contiguous()


@torch.library.custom_op("shardwright::deal_sequence", mutates_args=())
def _deal(x: Tensor, group: str, dim: int, summed: bool, after: Tensor | None = None) -> Tensor:
    members = group_of(group)
    sizes = even_sizes(x.shape[dim], members.size())
    if summed:
        return reduce_scatter(x.contiguous(), members, dim, sizes).contiguous()
    return own_part(x, members, dim, sizes)


@_gather.register_fake
def _(x: Tensor, group: str, dim: int, length: int, for_shards: bool, *_: Any, **__: Any) -> Tensor:
    return _with_length(x, dim, length)


@_deal.register_fake
def _(x: Tensor, group: str, dim: int, summed: bool, after: Tensor | None = None) -> Tensor:
    return _with_length(x, dim, own_size(x.shape[dim], group))


def own_size(length: int, group: str) -> int:
    """Of `length` positions those of this rank."""
    members = group_of(group)
    return (length + members.size() - 1 - members.rank()) // members.size()


def _with_length(x: Tensor, dim: int, length: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = length
    return x.new_empty(shape)


def _keep_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.dim, _, ctx.for_shards, *_ = inputs


def _keep_deal(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.group, ctx.dim, *_ = inputs
    ctx.length = x.shape[ctx.dim]


_gather.register_autograd(
    lambda ctx, dy: (_deal(dy, ctx.group, ctx.dim, ctx.for_shards), *[None] * 7), setup_context=_keep_gather
)
_deal.register_autograd(
    lambda ctx, dy: (_gather(dy, ctx.group, ctx.dim, ctx.length, False, False, False), *[None] * 4),
    setup_context=_keep_deal,
)


def gather_sequence(
    x: Tensor, group: str, dim: int, length: int, again: bool = False, in_parts: bool = False
) -> Tensor:
    return _gather(x, group, dim, length, False, again, in_parts)


def gather_for_parts(x: Tensor, group: str, dim: int, length: int) -> Tensor:
    """For modules of which every rank keeps a part of the result."""
    return _gather(x, group, dim, length, True, False, False)


def gather_again(x: Tensor, group: str, dim: int, length: int, gradient: Tensor) -> Tensor:
    """In a backward: it waits for `gradient`, or what is gathered would be kept from the forward instead."""
    return _gather(x, group, dim, length, False, False, False, gradient)


def deal_sum(x: Tensor, group: str, dim: int) -> Tensor:
    """Of a gradient, without one of its own."""
    return _deal(x, group, dim, True)


def scatter_sequence(x: Tensor, group: str, dim: int) -> Tensor:
    return _deal(x, group, dim, True)


def split_sequence(x: Tensor, group: str, dim: int) -> Tensor:
    return _deal(x, group, dim, False)


def read_by_shards(graph: fx.Graph) -> None:
    """Let copies of what was gathered be gathers whose gradients are dealt out as they are summed. For graphs of
    forwards.
    """
    share_gathers(graph, differentiated=False)
    for node in list(graph.nodes):
        if not (calls(node, "copy_to_group") and isinstance(gathered := node.args[0], fx.Node)):
            continue
        if calls(gathered, "gather_sequence") and gathered.args[1] == node.args[1]:
            with graph.inserting_before(node):
                other = graph.call_function(gathered.target, (*gathered.args[:4], True, *gathered.args[5:7]))  # type: ignore[arg-type]
            other.meta.update(node.meta)
            node.replace_all_uses_with(other)
            graph.erase_node(node)
            if not gathered.users:
                graph.erase_node(gathered)


def share_gathers(graph: fx.Graph, differentiated: bool = True) -> None:
    """Let gathers of the same tensor be one: of readers that count alike, and of all in graphs that autograd has been
    through.
    """
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if calls(node, "gather_sequence"):
            kept = first.setdefault(node.args[: 4 if differentiated else 5], node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)
