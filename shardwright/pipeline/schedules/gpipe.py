"""GPipe: all forwards, then all backwards. Simple, and holds the activations of every microbatch."""

from __future__ import annotations

from ..actions import Action, Kind
from ..placement import Placement


def gpipe(placement: Placement, rank: int, num_microbatches: int) -> list[Action]:
    """Bubble (p - 1) / (m + p - 1) for p ranks and m microbatches; m live activations on every rank."""
    stage = placement.stage_of(rank, 0)
    actions: list[Action] = []

    # Phase 1, forward: m times F
    actions += [Action(Kind.F, stage, microbatch) for microbatch in range(num_microbatches)]

    # Phase 2, backward: m times B, in the order of the forwards so that gradients add up in the same order as in 1F1B
    actions += [Action(Kind.B, stage, microbatch) for microbatch in range(num_microbatches)]
    return actions
