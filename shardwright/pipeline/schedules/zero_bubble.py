"""ZB-H1: weight gradients are put off to fill the bubble, at the activation memory of 1F1B.

The backward pass is split into I (gradient of the input, which the previous stage waits for) and W (gradient of the weights,
which nobody waits for). Rank r runs its first r microbatches without W, so that input gradients travel up early, and makes
up for it at the end, where 1F1B would wait. An activation lives until its W: p - r by the warm-up as in 1F1B plus the r
that are put off, so no rank ever holds more than the p that the first rank of 1F1B holds.
"""

from __future__ import annotations

from ..actions import Action, Kind
from ..placement import Placement


def zero_bubble(placement: Placement, rank: int, num_microbatches: int) -> list[Action]:
    """Bubble of (p - 1) slots out of 3 m + p - 1 for F = I = W and m >= p: a third of 1F1B's 3 (p - 1)."""
    stage = placement.stage_of(rank, 0)
    num_warmup = min(num_microbatches, placement.num_ranks - 1 - rank)
    num_steady = num_microbatches - num_warmup
    actions: list[Action] = []
    num_weights = 0

    # Phase 1, warm-up: min(m, p - 1 - rank) times F
    actions += [Action(Kind.F, stage, microbatch) for microbatch in range(num_warmup)]

    # Phase 2, steady: m - warm-up times F I, and W from the time on that `rank` of them wait
    for step in range(num_steady):
        actions += (Action(Kind.F, stage, num_warmup + step), Action(Kind.I, stage, step))
        if step >= rank:
            actions.append(Action(Kind.W, stage, num_weights))
            num_weights += 1

    # Phase 3, cool-down: as many I W as there were F in the warm-up
    for microbatch in range(num_steady, num_microbatches):
        actions += (Action(Kind.I, stage, microbatch), Action(Kind.W, stage, num_weights))
        num_weights += 1

    # Phase 4, the rest: min(m, rank) times W
    actions += [Action(Kind.W, stage, microbatch) for microbatch in range(num_weights, num_microbatches)]
    return actions
