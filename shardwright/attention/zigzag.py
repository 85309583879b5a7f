"""Which positions of a sequence a rank holds.

in order   rank k of n holds the k-th n-th of the sequence
zig-zag    the sequence is cut into 2n pieces, and rank k holds pieces k and 2n - 1 - k: under a causal mask every
           rank has then the same amount of attention to compute

Where several ranks stand in the place of one, they hold equal parts of what it would hold, in its order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The positions of one rank. Lengths must be a multiple of `multiple`.

    among, place    of so many ranks that share them equally, this one has the part at `place`
    """

    rank: int
    ranks: int
    zigzag: bool = False
    among: int = 1
    place: int = 0

    @property
    def multiple(self) -> int:
        return math.lcm(self._pieces, self.ranks * self.among)

    @property
    def _pieces(self) -> int:
        return 2 * self.ranks if self.zigzag else self.ranks

    def of_rank(self, rank: int) -> Share:
        return replace(self, rank=rank)

    def of_holder(self, number: int) -> Share:
        """Of one of all `ranks * among`, those that share a place one after the other."""
        rank, place = divmod(number, self.among)
        return replace(self, rank=rank, place=place)

    def shared_by(self, among: int, place: int) -> Share:
        """What one of `among` ranks has, which share this."""
        return replace(self, among=among, place=place)

    def spans(self, length: int) -> list[tuple[int, int]]:
        """(start, stop) of the pieces of this rank, of a sequence of `length` tokens, in the order it holds them."""
        assert torch.compiler.is_compiling() or length % self.multiple == 0, f"{length}: no multiple of {self.multiple}"
        size = length // self._pieces
        pieces = (self.rank, self._pieces - 1 - self.rank) if self.zigzag else (self.rank,)
        held = length // (self.ranks * self.among)
        first, last = self.place * held, (self.place + 1) * held  # of what lies in all pieces together
        found = []
        for before, piece in zip((0, size), pieces, strict=False):
            start, stop = max(first - before, 0), min(last - before, size)
            if start < stop:
                found.append((piece * size + start, piece * size + stop))
        return found

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """[..., S, ...] -> [..., S / n, ...]"""
        if torch.compiler.is_compiling():  # with no branch that a length takes
            return whole.index_select(dim, self.positions(whole.shape[dim], whole.device))
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.spans(whole.shape[dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Of this rank's tokens in the whole sequence, [S / n]."""
        assert torch.compiler.is_compiling() or length % self.multiple == 0, f"{length}: no multiple of {self.multiple}"
        size, held = length // self._pieces, length // (self.ranks * self.among)
        inside = torch.arange(self.place * held, (self.place + 1) * held, device=device)  # the pieces, put together
        skipped = (self._pieces - 2 - 2 * self.rank) * size if self.zigzag else 0
        return inside + self.rank * size + (inside >= size) * skipped
