"""Evaluation: forwards only, in the order that keeps every rank busy, for each placement."""

from __future__ import annotations

from ..actions import Action, Kind
from ..placement import Placement
from .interleaved import round_order


def forward_only(placement: Placement, rank: int, num_microbatches: int) -> list[Action]:
    """p - 1 slots of waiting on top of v m (round robin: for multiples of p), 2 (p - 1) in a V: none can do with less."""
    stages = placement.stages_of(rank)
    if placement.style != "v":
        # One round after the other, in it chunk by chunk; with one chunk this is microbatch after microbatch.
        return [Action(Kind.F, stages[chunk], microbatch) for chunk, microbatch in round_order(placement, num_microbatches)]

    # Phase 1, down: min(m, 2 (p - rank) - 1) times F0, until the first microbatch is back from the turn
    num_down = min(num_microbatches, 2 * (placement.num_ranks - rank) - 1)
    actions = [Action(Kind.F, stages[0], microbatch) for microbatch in range(num_down)]

    # Phase 2, down and up: m - phase 1 times F1 F0
    for step in range(num_microbatches - num_down):
        actions += (Action(Kind.F, stages[1], step), Action(Kind.F, stages[0], num_down + step))

    # Phase 3, up: as many F1 as there were F0 in phase 1
    actions += [Action(Kind.F, stages[1], microbatch) for microbatch in range(num_microbatches - num_down, num_microbatches)]
    return actions
