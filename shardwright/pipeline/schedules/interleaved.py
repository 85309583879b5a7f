"""Interleaved 1F1B: several chunks per rank, a bubble smaller by their number.

The microbatches are run in rounds: a round takes its microbatches through chunk 0, then through chunk 1, and so on. A round
of at least `num_ranks` microbatches never waits for itself, because the first one is back from the last rank by the time
the rank has finished with the last one. So `m` microbatches are split into `m // p` rounds that are as even as possible,
larger ones first: any number works, and a multiple of p gives the classical rounds of p.
"""

from __future__ import annotations

from ..actions import Action, Kind
from ..placement import Placement


def round_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Sizes of the rounds: max(1, m // p) of them, even, larger ones first (the warm-up is made for the first)."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def round_order(placement: Placement, num_microbatches: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) in the order in which a rank runs forward: round by round, in it chunk by chunk."""
    order: list[tuple[int, int]] = []
    start = 0
    for size in round_sizes(placement.num_ranks, num_microbatches):
        order += [(chunk, start + i) for chunk in range(placement.num_chunks) for i in range(size)]
        start += size
    return order


def interleaved(placement: Placement, rank: int, num_microbatches: int) -> list[Action]:
    """Bubble (p - 1) / (v m + p - 1) for p ranks, v chunks and m microbatches, a multiple of p."""
    p, v = placement.num_ranks, placement.num_chunks
    stages = placement.stages_of(rank)
    order = round_order(placement, num_microbatches)
    forward = [Action(Kind.F, stages[chunk], microbatch) for chunk, microbatch in order]
    backward = [Action(Kind.B, stages[v - 1 - chunk], microbatch) for chunk, microbatch in order]

    # Phase 1, warm-up: (v - 1) * r + 2 * (p - 1 - rank) times F, r = size of the first round: all but the last chunk of
    # the first round, and two more for every rank between here and the last
    num_warmup = min(v * num_microbatches, (v - 1) * round_sizes(p, num_microbatches)[0] + 2 * (p - 1 - rank))
    num_steady = v * num_microbatches - num_warmup
    actions = forward[:num_warmup]

    # Phase 2, steady: v * m - warm-up times F B
    for step in range(num_steady):
        actions += (forward[num_warmup + step], backward[step])

    # Phase 3, cool-down: as many B as there were F in the warm-up
    actions += backward[num_steady:]
    return actions
