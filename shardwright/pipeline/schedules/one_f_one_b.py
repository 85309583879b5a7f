"""1F1B: as few live activations as the depth of the pipeline asks for."""

from __future__ import annotations

from ..planning.placement import Placement
from .phases import B, F, Letters, times


def one_f_one_b(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """Bubble (p - 1) / (m + p - 1) for p ranks and m microbatches; min(m, p - rank) live activations."""
    num_warmup = min(num_microbatches, placement.num_ranks - 1 - rank)
    return [
        times(num_warmup, F()),  # warm-up, until the first gradient can have come back
        times(num_microbatches - num_warmup, F(), B()),  # steady
        times(num_warmup, B()),  # cool-down
    ]
