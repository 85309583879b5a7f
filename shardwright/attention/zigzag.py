"""Which positions of a sequence a rank holds.

in order   rank k of n holds the k-th n-th of the sequence
zig-zag    the sequence is cut into 2n pieces, and rank k holds pieces k and 2n - 1 - k: under a causal mask every
           rank has then the same amount of attention to compute
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The positions of one rank. Lengths must be a multiple of `multiple`."""

    rank: int
    ranks: int
    zigzag: bool = False

    @property
    def multiple(self) -> int:
        return 2 * self.ranks if self.zigzag else self.ranks

    def of_rank(self, rank: int) -> Share:
        return Share(rank, self.ranks, self.zigzag)

    def spans(self, length: int) -> list[tuple[int, int]]:
        """(start, stop) of the pieces of this rank, of a sequence of `length` tokens, in the order it holds them."""
        assert length % self.multiple == 0, f"{length} is no multiple of {self.multiple}"
        size = length // self.multiple
        pieces = (self.rank, self.multiple - 1 - self.rank) if self.zigzag else (self.rank,)
        return [(piece * size, (piece + 1) * size) for piece in pieces]

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """[..., S, ...] -> [..., S / n, ...]"""
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.spans(whole.shape[dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Of this rank's tokens in the whole sequence, [S / n]."""
        return self.part(torch.arange(length, device=device), 0)
