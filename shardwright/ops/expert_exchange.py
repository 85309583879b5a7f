"""Tokens on their way to the ranks that hold their experts, and what the experts made of them on the way back.

    routes = find_routes(index, experts, group)     which tokens go where; one small all-to-all of counts
    arrived = send_tokens(x, index, weights, routes)    what this rank's experts are to compute
    y = return_sums(sums, routes)                   [R, H] -> [T, H]: the sum over ranks of what they made of a token

T tokens choose K of E experts each, E/n of which every rank holds. A token travels once to each rank that holds any of
its experts, with the numbers and the weights of all of them, and comes back as one weighted sum. R tokens arrive, of
which P choices are this rank's: nothing is dropped or padded.

[Note: one read] How much a rank sends to and receives from each other must be known on the host before tokens can
travel. Counts are traded on the device and then read, both at once: the one time that the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..comm import compat, turns
from ..utils.torch_names import FakeTensor
from .keeping import keep_result

NUMBER = 4  # bytes in which an expert's number travels
_ALIGNED = 8  # every part of a packed row has a multiple of so many bytes, so that parts are views of what arrived


class Routes(NamedTuple):
    """
    tokens            [sum(sent)] numbers of the tokens that travel, by the rank that they go to
    sent, received    tokens that go to and come from every rank
    arriving          choices of the tokens that come, which are for this rank's experts
    first, here       number of this rank's first expert, and how many it has
    """

    tokens: Tensor
    sent: list[int]
    received: list[int]
    arriving: int
    first: int
    here: int
    group: dist.ProcessGroup


class Arrived(NamedTuple):
    """
    x          [R, H] tokens, by the rank that they come from
    rows       [P] which of them each choice is of
    experts    [P] the experts chosen, as this rank numbers its own
    weights    [P]
    """

    x: Tensor
    rows: Tensor
    experts: Tensor
    weights: Tensor


@torch.compiler.disable(reason="how many tokens go to which experts is known to the router alone")  # type: ignore[untyped-decorator]
@torch.no_grad()
def find_routes(index: Tensor, num_experts: int, group: dist.ProcessGroup) -> Routes:
    """`index` [T, K] are numbers of experts; a collective over the group."""
    ranks, here = group.size(), num_experts // group.size()
    owners = index.long() // here
    choices = owners.new_zeros(len(index), ranks).scatter_add_(1, owners, torch.ones_like(owners))
    goes = choices.t() > 0
    counts = torch.stack([goes.sum(1), choices.sum(0)], 1)  # tokens and choices
    coming = torch.empty_like(counts)
    turns.run(compat.all_to_all_single, coming, counts, group=group)
    if isinstance(index, FakeTensor):
        sent, arriving = _if_chosen_alike(index.shape, num_experts, ranks)
        received = sent
    else:
        (sent, _), (received, chosen) = torch.stack([counts.t(), coming.t()]).tolist()  # see [Note: one read]
        arriving = sum(chosen)
    tokens = _places(goes, sum(sent)) % max(len(index), 1)
    return Routes(tokens, sent, received, arriving, group.rank() * here, here, group)


def _if_chosen_alike(shape: Sequence[int], experts: int, ranks: int) -> tuple[list[int], int]:
    """Tokens to every rank, and choices that arrive on each, where `shape` [T, K] are choices of a plan, which nobody
    has made: every one is as likely as any other.
    """
    tokens, choices = shape
    elsewhere = Fraction(comb(experts - experts // ranks, choices), comb(experts, choices))
    return [round(tokens * (1 - elsewhere))] * ranks, tokens * choices


def send_tokens(x: Tensor, index: Tensor, weights: Tensor, routes: Routes) -> Arrived:
    """forward   x [T, H], index [T, K] and weights [T, K] of the tokens that come
    backward  the sum over the ranks that a token went to of what comes back for it and its weights
    """
    numbers = index.to(torch.int32)
    parts = [part[routes.tokens] for part in (x, weights, numbers)]
    x, weights, numbers = _exchange(parts, routes.sent, routes.received, routes.group)
    own = numbers - routes.first
    choices = _places((own >= 0) & (own < routes.here), routes.arriving)
    return Arrived(x, choices // own.shape[1], own.flatten()[choices].long(), weights.flatten()[choices])


def return_sums(sums: Tensor, routes: Routes, tokens: int) -> Tensor:
    """forward   [R, H] -> [T, H], added up in single precision or better
    backward  every token's gradient to all ranks that it went to
    """
    (back,) = _exchange([sums], routes.received, routes.sent, routes.group)
    return add_rows(back, routes.tokens, tokens)


def add_rows(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """[P, H] -> [count, H]: the sum over all values of the same row, in single precision or better."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    return values.new_zeros(count, values.shape[1], dtype=dtype).index_add(0, rows, values.to(dtype))


def _places(where: Tensor, count: int) -> Tensor:
    """Numbers of the elements that are not zero; `count` is how many, so that nobody waits to hear it."""
    return torch.repeat_interleave(where.flatten().long(), output_size=count)


def _exchange(
    parts: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", _Exchange.apply(sent, received, group, *parts))


def _trade(
    parts: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Rows of all parts in one message."""
    packed = parts[0].contiguous() if len(parts) == 1 else _packed(parts)

    def run() -> Tensor:
        arrived = packed.new_empty(sum(received), *packed.shape[1:])
        turns.run(compat.all_to_all_single, arrived, packed, list(received), list(sent), group=group)
        return arrived

    arrived = keep_result(run)
    return (arrived,) if len(parts) == 1 else _unpacked(arrived, parts)


def packed_size(*sizes: int) -> int:
    """Bytes of a row whose parts have so many."""
    return sum(size + -size % _ALIGNED for size in sizes)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    rows = [part.contiguous().view(torch.uint8) for part in parts]
    return torch.cat([F.pad(row, (0, packed_size(row.shape[1]) - row.shape[1])) for row in rows], 1)


def _unpacked(arrived: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Parts with the features and types of `parts`: views."""
    found, place = [], 0
    for part in parts:
        size = part.shape[1] * part.itemsize
        found.append(arrived[:, place : place + size].view(part.dtype))
        place += packed_size(size)
    return tuple(found)


class _Exchange(torch.autograd.Function):
    """forward   parts [sum(sent), ...], by rank that they go to -> [sum(received), ...], by rank that they come from
    backward  the same with sent and received exchanged, for the parts that have a gradient
    """

    @staticmethod
    def forward(
        ctx: Any, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = tuple(part.detach() for part in _trade(parts, sent, received, group))
        ctx.mark_non_differentiable(*_unneeded(ctx, arrived))
        return arrived

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        trade = _exchange if torch.is_grad_enabled() else _trade
        given = [grad for grad, needs in zip(grads, needed, strict=True) if needs]
        back = iter(trade(given, ctx.received, ctx.sent, ctx.group))
        return None, None, None, *(next(back) if needs else None for needs in needed)


def _unneeded(ctx: Any, arrived: Sequence[Tensor]) -> list[Tensor]:
    return [part for part, needs in zip(arrived, ctx.needs_input_grad[3:], strict=True) if not needs]
