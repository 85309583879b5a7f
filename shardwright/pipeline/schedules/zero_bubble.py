"""ZB-H1: weight gradients are put off to fill the bubble, at the activation memory of 1F1B.

The backward pass is split into I (gradient of the input, which the previous stage waits for) and W (gradient of the
weights, which nobody waits for). Rank r runs its first r microbatches without W, so that input gradients travel up
early, and makes up for it at the end, where 1F1B would wait. An activation lives until its W: p - r by the warm-up as
in 1F1B plus the r that are put off, so no rank ever holds more than the p that the first rank of 1F1B holds.
"""

from __future__ import annotations

from ..planning.placement import Placement
from .phases import F, I, Letters, W, times


def zero_bubble(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """Bubble of (p - 1) slots out of 3 m + p - 1 for F = I = W and m >= p: a third of 1F1B's 3 (p - 1)."""
    num_warmup = min(num_microbatches, placement.num_ranks - 1 - rank)
    num_steady = num_microbatches - num_warmup
    num_late = min(num_steady, rank)
    return [
        times(num_warmup, F()),  # warm-up
        times(num_late, F(), I()),  # steady, until `rank` weight gradients wait
        times(num_steady - num_late, F(), I(), W()),  # steady
        times(num_warmup, I(), W()),  # cool-down
        times(num_late, W()),  # the rest
    ]
