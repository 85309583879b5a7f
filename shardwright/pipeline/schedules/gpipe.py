"""GPipe: all forwards, then all backwards. Simple, and holds the activations of every microbatch."""

from __future__ import annotations

from ..planning.placement import Placement
from .phases import B, F, Letters, times


def gpipe(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """Bubble (p - 1) / (m + p - 1) for p ranks and m microbatches; m live activations on every rank."""
    return [
        times(num_microbatches, F()),  # forward
        # backward, in the order of the forwards so that gradients add up in the same order as in 1F1B
        times(num_microbatches, B()),
    ]
