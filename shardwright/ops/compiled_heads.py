"""Sequences for heads, and back, as an operator that torch.compile keeps in one graph.

With n ranks, of which rank k has h_k of all H heads and every one S / n positions, in dims that are named:

    trade_heads     to_heads    [H, S/n] -> [h_k, S]        backward    the other way round
                    else        [h_k, S] -> [H, S/n]

Sizes of sequences are read off the tensor, so that a graph serves all of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .collective import all_to_all
from .compiled import group_of


@torch.library.custom_op("shardwright::trade_heads", mutates_args=())
def _trade(
    x: Tensor, group: str, heads: list[int], dims: list[int], to_heads: bool, after: Tensor | None = None
) -> Tensor:
    """`heads` of all ranks; `dims` of heads and of the sequence."""
    members = group_of(group)
    (of_heads, along), ranks = dims, members.size()
    if to_heads:
        traded = all_to_all(x, members, of_heads, along, heads, [x.shape[along]] * ranks)
    else:
        traded = all_to_all(x, members, along, of_heads, [x.shape[along] // ranks] * ranks, heads)
    return traded.contiguous()


@_trade.register_fake
def _(x: Tensor, group: str, heads: list[int], dims: list[int], to_heads: bool, after: Tensor | None = None) -> Tensor:
    members = group_of(group)
    (of_heads, along), ranks = dims, members.size()
    shape = list(x.shape)
    shape[of_heads] = heads[members.rank()] if to_heads else sum(heads)
    shape[along] = x.shape[along] * ranks if to_heads else x.shape[along] // ranks
    return x.new_empty(shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.group, ctx.heads, ctx.dims, ctx.to_heads, *_ = inputs


_trade.register_autograd(
    lambda ctx, dy: (_trade(dy, ctx.group, ctx.heads, ctx.dims, not ctx.to_heads), *[None] * 5), setup_context=_keep
)


def trade_heads(x: Tensor, group: str, heads: list[int], dims: tuple[int, int], to_heads: bool) -> Tensor:
    return _trade(x, group, heads, list(dims), to_heads)
