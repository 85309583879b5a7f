"""Parts of sequences for whole ones, and back, for modules that have to see a whole sequence.

    gather      [B, S/n, ...] -> [B, S, ...]     every rank has the whole, in order
    part        [B, S, ...] -> [B, S/n, ...]     and keeps its part of what it makes of it

What a rank computes between the two counts for its own part of the result alone: gradients of parameters are those of
that part, and gradients of what was gathered are summed over the ranks on their way back.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.collective import gather_for_shards
from .zigzag import Share


class Exchange:
    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        self.share, self.group = share, group
        self.multiple = share.multiple

    @property
    def ranks(self) -> int:
        return self.share.ranks

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        return self.share.part(whole, dim).contiguous()

    def spans(self, length: int) -> list[tuple[int, int]]:
        """(start, stop) of what this rank has of a sequence of `length` tokens, for its attention."""
        return self.share.spans(length)

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        whole = gather_for_shards(x.contiguous(), self.group, dim)
        if not self.share.zigzag:
            return whole
        length = whole.shape[dim]
        held = [self.share.of_rank(rank).positions(length, x.device) for rank in range(self.ranks)]
        return whole.index_select(dim, torch.cat(held).argsort())


class Trial(Exchange):
    """Stands for the ranks in one process.

    halves  whether it is the first of two ranks, of which the other is given the same: then numbers mean nothing, and
            lengths are those of two ranks. Else it is one that holds whole sequences, in another order
    """

    def __init__(self, multiple: int = 1) -> None:
        self.share = Share(0, 1)
        self.multiple, self.halves = multiple, False

    @property
    def ranks(self) -> int:
        return 2 if self.halves else 1

    def order(self, length: int) -> Tensor:
        return torch.randperm(length, generator=torch.Generator().manual_seed(length))

    def part(self, whole: Tensor, dim: int = 1) -> Tensor:
        length = whole.shape[dim]
        return (
            whole.narrow(dim, 0, length // 2).contiguous()
            if self.halves
            else whole.index_select(dim, self.order(length))
        )

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        return torch.cat([x, x], dim) if self.halves else x.index_select(dim, self.order(x.shape[dim]).argsort())
