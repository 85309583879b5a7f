"""1F1B: as few live activations as the depth of the pipeline asks for."""

from __future__ import annotations

from ..actions import Action, Kind
from ..placement import Placement


def one_f_one_b(placement: Placement, rank: int, num_microbatches: int) -> list[Action]:
    """Bubble (p - 1) / (m + p - 1) for p ranks and m microbatches; min(m, p - rank) live activations."""
    stage = placement.stage_of(rank, 0)
    num_warmup = min(num_microbatches, placement.num_ranks - 1 - rank)
    num_steady = num_microbatches - num_warmup
    actions: list[Action] = []

    # Phase 1, warm-up: min(m, p - 1 - rank) times F, until the first gradient can have come back
    actions += [Action(Kind.F, stage, microbatch) for microbatch in range(num_warmup)]

    # Phase 2, steady: m - warm-up times F B
    for step in range(num_steady):
        actions += (Action(Kind.F, stage, num_warmup + step), Action(Kind.B, stage, step))

    # Phase 3, cool-down: as many B as there were F in the warm-up
    actions += [Action(Kind.B, stage, microbatch) for microbatch in range(num_steady, num_microbatches)]
    return actions
