"""What ZeRO sends in a group that quantises (`comm.quantised_wire`), on flat buffers in place.

    gradients   every rank's part of a bucket goes to its owner in 8 bits, who adds in fp32
    weights     stages 1 and 2: how far the master is from the working parameters, which all ranks hold alike, and to
                which all ranks, the owner too, add what has arrived
                stage 3: the master itself, as nobody has working parameters to start from

[Note: weights that all ranks hold alike] The owner of a part takes what the others get, not its master: all copies
of the working parameters are equal bit by bit. Differences do not pile up, because each step sends the distance to what
the ranks really hold: it is at most 2^-4 of the last update off, and half a unit of the working dtype. Where the master
is the working parameter itself (fp32, or no master weights) it would have to be rounded, so there it travels exactly.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from ..comm.compat import all_gather_single, all_to_all_single
from ..comm.handle import Handle, Messages
from ..comm.quantised import dequantise, quantise
from ..utils.streams import has_streams
from .peers import others_from


def reduce_scatter_quantised(rows: torch.Tensor, group: dist.ProcessGroup, tag: int) -> Handle[torch.Tensor]:
    """As `zero.collectives.reduce_scatter_in_place`."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    payload = quantise(rows)
    arrived = torch.empty_like(payload)
    mine = rows[rank]

    @torch.no_grad()
    def add() -> torch.Tensor:
        total = mine.new_zeros(mine.shape, dtype=torch.float32)
        for peer in range(ranks):  # in rank order, so that runs repeat bit by bit
            total += mine if peer == rank else dequantise(arrived[peer], mine.numel())
        return mine.copy_(total)

    if has_streams(rows.device):
        work = all_to_all_single(arrived.view(-1), payload.view(-1), group=group, async_op=True)
        return Handle("reduce_scatter", [work], add, keep=(payload, arrived))
    others = others_from(rank, ranks)
    works = [dist.irecv(arrived[peer], group=group, group_src=peer, tag=tag) for peer in others]
    works += [dist.isend(payload[peer], group=group, group_dst=peer, tag=tag) for peer in others]
    return Messages("reduce_scatter", works, add, keep=(payload, arrived))


def gather_updates(
    flat: torch.Tensor, low: int, high: int, master: torch.Tensor, group: dist.ProcessGroup, tag: int
) -> Handle[torch.Tensor]:
    """Start bringing `flat` [k * n], which all ranks hold alike, to the masters: this rank's is that of [low, high)."""
    distance = master.to(flat.device, torch.float32) - flat[low:high]
    return _gather(flat, quantise(distance), group, tag, adds=True)


def gather_masters(
    flat: torch.Tensor, master: torch.Tensor, group: dist.ProcessGroup, tag: int
) -> Handle[torch.Tensor]:
    """Start filling `flat` [k * n] with every rank's master."""
    return _gather(flat, quantise(master.to(flat.device, non_blocking=True)), group, tag, adds=False)


def _gather(
    flat: torch.Tensor, payload: torch.Tensor, group: dist.ProcessGroup, tag: int, adds: bool
) -> Handle[torch.Tensor]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    everyone = payload.new_empty(ranks, payload.numel())
    finish = partial(_take, flat, everyone, adds)
    if has_streams(flat.device):
        work = all_gather_single(everyone.view(-1), payload, group=group, async_op=True)
        return Handle("all_gather", [work], finish, keep=(payload, everyone))
    everyone[rank].copy_(payload)
    others = others_from(rank, ranks)
    works = [dist.irecv(everyone[peer], group=group, group_src=peer, tag=tag) for peer in others]
    works += [dist.isend(payload, group=group, group_dst=peer, tag=tag) for peer in others]
    return Messages("all_gather", works, finish, keep=(payload, everyone))


@torch.no_grad()
def _take(flat: torch.Tensor, everyone: torch.Tensor, adds: bool) -> torch.Tensor:
    for part, payload in zip(flat.chunk(len(everyone)), everyone, strict=True):
        if adds:
            part.copy_(dequantise(payload, part.numel()).add_(part))
        else:
            part.copy_(dequantise(payload, part.numel(), part.dtype))
    return flat
