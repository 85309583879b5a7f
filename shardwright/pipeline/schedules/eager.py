"""1F1B with a warm-up twice as deep, which leaves time for messages to travel.

In 1F1B a rank's next gradient leaves the rank below just when it is needed, so every microbatch waits for a message
down and one up. Here every rank is two forwards ahead of the next one: while a message travels there is another
microbatch to work on.
"""

from __future__ import annotations

from ..planning.placement import Placement
from .phases import B, F, Letters, times


def eager_1f1b(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """Bubble as 1F1B's where messages take no time; min(m, 2 (p - rank) - 1) live activations."""
    num_warmup = min(num_microbatches, 2 * (placement.num_ranks - 1 - rank))
    return [
        times(num_warmup, F()),  # warm-up
        times(num_microbatches - num_warmup, F(), B()),  # steady
        times(num_warmup, B()),  # cool-down
    ]
