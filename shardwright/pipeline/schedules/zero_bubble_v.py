"""ZB-V: two chunks per rank in a V, weight gradients put off, near-zero bubble at the activation memory of 1F1B.

Rank r holds stage r (chunk 0, on the way down) and stage 2 p - 1 - r (chunk 1, on the way up), so the loss is on rank 0 and
the first gradient comes back to every rank as soon as the last forward has passed.
"""

from __future__ import annotations

from ..actions import Action, Kind
from ..placement import Placement


def zero_bubble_v(placement: Placement, rank: int, num_microbatches: int) -> list[Action]:
    """Bubble of (p - 1) slots out of 6 m + p - 1 for F = I = W and m >= 2 p - 1; at most 2 p live half-size activations.

    The phases need 2 p - 1 microbatches to mesh. Fewer are planned as if there were as many, and those that do not exist
    are left out.
    """
    p = placement.num_ranks
    num_planned = max(num_microbatches, 2 * p - 1)
    stages = placement.stages_of(rank)
    actions: list[Action] = []
    counts = {(kind, chunk): 0 for kind in (Kind.F, Kind.I, Kind.W) for chunk in (0, 1)}

    def add(kind: Kind, chunk: int) -> None:
        """The next microbatch of this kind and chunk; every kind takes the microbatches in order."""
        microbatch = counts[kind, chunk]
        counts[kind, chunk] = microbatch + 1
        if microbatch < num_microbatches:
            actions.append(Action(kind, stages[chunk], microbatch))

    # Phase 1, down: 2 (p - rank) - 1 times F0, until the first microbatch is back from the turn
    for _ in range(2 * (p - rank) - 1):
        add(Kind.F, 0)

    # Phase 2, down and up: rank times F1 F0
    for _ in range(rank):
        add(Kind.F, 1)
        add(Kind.F, 0)

    # Phase 3, first gradients: p - rank times F1 I1 W1
    for _ in range(p - rank):
        add(Kind.F, 1)
        add(Kind.I, 1)
        add(Kind.W, 1)

    # Phase 4, steady: m - 2 p + 1 + rank times F0 I0 W0 F1 I1 W1 ...
    for _ in range(num_planned - counts[Kind.F, 0]):
        for chunk in (0, 1):
            add(Kind.F, chunk)
            add(Kind.I, chunk)
            add(Kind.W, chunk)
    # ... and, the forwards of chunk 0 having ended, as often as chunk 1 is behind: I0 W0 F1 I1 W1
    for _ in range(num_planned - counts[Kind.F, 1]):
        add(Kind.I, 0)
        add(Kind.W, 0)
        add(Kind.F, 1)
        add(Kind.I, 1)
        add(Kind.W, 1)

    # Phase 5, gradients up: rank times I0 I1, their W put off
    for _ in range(rank):
        add(Kind.I, 0)
        add(Kind.I, 1)

    # Phase 6, gradients down: p - rank times I0 W0
    for _ in range(p - rank):
        add(Kind.I, 0)
        add(Kind.W, 0)

    # Phase 7, the rest: rank times W1, rank times W0
    for chunk in (1, 0):
        for _ in range(num_planned - counts[Kind.W, chunk]):
            add(Kind.W, chunk)
    assert all(count == num_planned for count in counts.values()), (placement, rank, num_microbatches, counts)
    return actions
