"""Rows of tokens on their way to the ranks that hold their experts, and back.

    routes = find_routes(index, experts, group)     which rows go where; one small all-to-all of counts
    rows = send_rows(x, routes)                     [T, H] -> [R, H]: what this rank's experts are to compute
    y = return_rows(rows, routes)                   [R, H] -> [T, K, H]: what the experts made of every token's choices

T tokens choose K of E experts each, E/n of which every rank holds. R is whatever arrives: nothing is dropped or padded.

[Note: one read] How much a rank sends to and receives from each other must be known on the host before the rows can
travel. Counts by expert are traded on the device and then read, both at once: the one time that the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import compat, turns
from .keeping import keep_result


class Routes(NamedTuple):
    """
    order             [T * K] numbers of choices (token * K + place), sorted by expert
    choices           K
    sent, received    rows that go to and come from every rank
    experts           [R] numbers of this rank's experts, one for each row that arrives
    """

    order: Tensor
    choices: int
    sent: list[int]
    received: list[int]
    experts: Tensor
    group: dist.ProcessGroup


@torch.no_grad()
def find_routes(index: Tensor, num_experts: int, group: dist.ProcessGroup) -> Routes:
    """`index` [T, K] are numbers of experts; a collective over the group."""
    ranks, here = group.size(), num_experts // group.size()
    chosen, order = index.reshape(-1).sort(stable=True)
    edges = torch.searchsorted(chosen, torch.arange(num_experts + 1, device=index.device, dtype=chosen.dtype))
    counts = edges.diff()
    arriving = torch.empty_like(counts)
    turns.run(compat.all_to_all_single, arriving, counts, [here] * ranks, [here] * ranks, group=group)
    sent, received = torch.stack([counts, arriving]).view(2, ranks, here).sum(-1).tolist()  # see [Note: one read]
    own = torch.arange(here, device=index.device).repeat(ranks)
    experts = own.repeat_interleave(arriving, output_size=sum(received))
    return Routes(order, index.shape[-1], sent, received, experts, group)


def send_rows(x: Tensor, routes: Routes) -> Tensor:
    """forward   [T, H] -> [R, H]: every token once for each expert that it chose here, by rank and expert
    backward  the sum over a token's choices of what comes back
    """
    return _exchange(x[routes.order // routes.choices], routes.sent, routes.received, routes.group)


def return_rows(rows: Tensor, routes: Routes) -> Tensor:
    """forward   [R, H] -> [T, K, H]
    backward  the same way as `send_rows`
    """
    back = _exchange(rows, routes.received, routes.sent, routes.group)
    places = torch.empty_like(routes.order)
    places[routes.order] = torch.arange(len(places), device=places.device)
    return back[places].view(-1, routes.choices, rows.shape[-1])


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Exchange.apply(rows, sent, received, group))


def _trade(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    turns.run(compat.all_to_all_single, arrived, rows.contiguous(), list(received), list(sent), group=group)
    return arrived


class _Exchange(torch.autograd.Function):
    """forward   rows [sum(sent), H], by rank that they go to -> [sum(received), H], by rank that they come from
    backward  the same with sent and received exchanged
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return cast(Tensor, keep_result(lambda: _trade(rows, sent, received, group)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        trade = _exchange if torch.is_grad_enabled() else _trade
        return trade(dy, ctx.received, ctx.sent, ctx.group), None, None, None
