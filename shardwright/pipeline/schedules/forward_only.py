"""Evaluation: forwards only, in the order that keeps every rank busy, for each placement."""

from __future__ import annotations

from ..placement import Placement
from .interleaved import round_order
from .phases import F, Letters, of_chunks, times


def forward_only(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """p - 1 slots of waiting on top of v m (round robin: for multiples of p), 2 (p - 1) in a V: none can do with less."""
    if placement.style != "v":
        # One round after the other, in it chunk by chunk; with one chunk this is microbatch after microbatch.
        return [of_chunks(F(), round_order(placement, num_microbatches))]
    num_down = min(num_microbatches, 2 * (placement.num_ranks - rank) - 1)
    return [
        times(num_down, F(0)),  # down, until the first microbatch is back from the turn
        times(num_microbatches - num_down, F(1), F(0)),  # down and up
        times(num_down, F(1)),  # up
    ]
