"""ZB-V: two chunks per rank in a V, weight gradients put off, near-zero bubble at the activation memory of 1F1B.

Rank r holds stage r (chunk 0, on the way down) and stage 2 p - 1 - r (chunk 1, on the way up), so the loss is on rank 0
and the first gradient comes back to every rank as soon as the last forward has passed.
"""

from __future__ import annotations

from ..planning.placement import Placement
from .phases import F, I, Letters, W, times


def zero_bubble_v(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """Bubble of (p - 1) slots out of 6 m + p - 1 for F = I = W and m >= 2 p - 1; at most 2 p live half-size
    activations.

    The phases need 2 p - 1 microbatches to mesh. Fewer are planned as if there were as many, and those that do not
    exist are left out.
    """
    p, m = placement.num_ranks, max(num_microbatches, 2 * placement.num_ranks - 1)
    return [
        times(2 * (p - rank) - 1, F(0)),  # down, until the first microbatch is back from the turn
        times(rank, F(1), F(0)),  # down and up
        times(p - rank, F(1), I(1), W(1)),  # first gradients
        times(m - 2 * p + 1 + rank, F(0), I(0), W(0), F(1), I(1), W(1)),  # steady
        times(p - 1 - rank, I(0), W(0), F(1), I(1), W(1)),  # the forwards of chunk 0 have ended
        times(rank, I(0), I(1)),  # gradients up, their weight gradients put off
        times(p - rank, I(0), W(0)),  # gradients down
        times(rank, W(1)),  # the rest
        times(rank, W(0)),
    ]
