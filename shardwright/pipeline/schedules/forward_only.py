"""Evaluation: forwards only, in the order that keeps every rank busy, for each placement."""

from __future__ import annotations

from ..planning.placement import Placement
from .interleaved import chunks_of, even
from .phases import F, Letters, of_chunks, times


def forward_only(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """p - 1 slots of waiting on top of v m (round robin: for multiples of p), 2 (p - 1) in a V: none can do with
    less.
    """
    if placement.style != "v":
        # Rounds of at least p, which never wait for themselves; nothing is held, so longer ones cost nothing.
        sizes = even(num_microbatches, max(1, num_microbatches // placement.num_ranks))
        return [of_chunks(F(), chunks_of(sizes, placement.num_chunks))]
    num_down = min(num_microbatches, 2 * (placement.num_ranks - rank) - 1)
    return [
        times(num_down, F(0)),  # down, until the first microbatch is back from the turn
        times(num_microbatches - num_down, F(1), F(0)),  # down and up
        times(num_down, F(1)),  # up
    ]
