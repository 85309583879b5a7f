"""Reduce-scatter and all-gather of a flat buffer in place: rank r of the group owns the r-th of its equal parts.

gloo's own reduce-scatter and all-gather take two to four times as long as the bytes need, so CPU buffers are exchanged
pairwise: every rank sends each part straight to its owner. The bytes sent are the same, (k-1)/k of the buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ..comm.compat import all_gather_single, reduce_scatter_single
from ..comm.handle import Handle, Messages
from ..comm.quantised_wire import travels_quantised
from ..utils.streams import has_streams
from .peers import others_from
from .quantised import reduce_scatter_quantised

SUMMED = "must be a floating-point dtype of 16 bits or more, in which ranks can sum, such as torch.bfloat16, or None"


def can_be_summed(dtype: torch.dtype) -> bool:
    """Whether reductions work in `dtype`: neither NCCL nor gloo adds 8-bit floats."""
    return dtype.is_floating_point and dtype.itemsize >= 2


Scratch = Callable[[int, torch.dtype], torch.Tensor]


def reduce_scatter_in_place(
    rows: torch.Tensor, group: dist.ProcessGroup, scratch: Scratch, tag: int = 0
) -> Handle[torch.Tensor]:
    """Start summing `rows` [k, n] over the group; `wait()` returns this rank's row [n], a view of `rows`.

    The other rows are left as they were or worse. `scratch(numel, dtype)` lends a buffer for what arrives on CPU, where
    rows need not lie side by side.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = rows.unbind()
    mine = parts[rank]
    if ranks == 1:
        return Handle("reduce_scatter", [], lambda: mine)
    if travels_quantised(rows, group):
        return reduce_scatter_quantised(rows, group, tag)
    if has_streams(rows.device):
        work = reduce_scatter_single(mine, rows.view(-1), group=group, async_op=True)
        return Handle("reduce_scatter", [work], lambda: mine, keep=rows)
    arrived = list(scratch(rows.numel() - mine.numel(), rows.dtype).chunk(ranks - 1))
    others = [peer for peer in range(ranks) if peer != rank]
    works = [
        dist.irecv(buffer, group=group, group_src=peer, tag=tag) for buffer, peer in zip(arrived, others, strict=True)
    ]
    works += [dist.isend(parts[peer], group=group, group_dst=peer, tag=tag) for peer in others_from(rank, ranks)]

    def add() -> torch.Tensor:
        # In rank order, so that runs repeat bit by bit, and so do layouts in which another rank owns an element.
        terms = [*arrived[:rank], mine, *arrived[rank:]]
        if ranks == 2:
            return mine.add_(arrived[0])
        for term in terms[1:]:
            terms[0].add_(term)
        return mine if rank == 0 else mine.copy_(terms[0])

    return Messages("reduce_scatter", works, add, keep=(rows, arrived))


def all_gather_in_place(flat: torch.Tensor, group: dist.ProcessGroup, tag: int = 0) -> Handle[torch.Tensor]:
    """Start filling `flat` [k * n] with every rank's own part, exactly; `wait()` returns `flat`."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = flat.chunk(ranks)
    if ranks == 1:
        return Handle("all_gather", [], lambda: flat)
    if has_streams(flat.device):
        work = all_gather_single(flat, parts[rank], group=group, async_op=True)
        return Handle("all_gather", [work], lambda: flat, keep=flat)
    others = others_from(rank, ranks)
    works = [dist.irecv(parts[peer], group=group, group_src=peer, tag=tag) for peer in others]
    works += [dist.isend(parts[rank], group=group, group_dst=peer, tag=tag) for peer in others]
    return Messages("all_gather", works, lambda: flat, keep=flat)
