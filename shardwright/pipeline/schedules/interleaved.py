"""Interleaved 1F1B: several chunks per rank, a bubble smaller by their number.

The microbatches are run in rounds: a round takes its microbatches through chunk 0, then through chunk 1, and so on. A round
of at least `num_ranks` microbatches never waits for itself, because the first one is back from the last rank by the time
the rank has finished with the last one. So `m` microbatches are split into `m // p` rounds that are as even as possible,
larger ones first: any number works, and a multiple of p gives the classical rounds of p.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .phases import B, F, Letters, in_turn, of_chunks


def round_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Sizes of the rounds: max(1, m // p) of them, even, larger ones first (the warm-up is made for the first)."""
    num_rounds = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, num_rounds)
    return [size + 1] * larger + [size] * (num_rounds - larger)


def round_order(placement: Placement, num_microbatches: int) -> NDArray[np.int64]:
    """Chunks in the order in which a rank runs forward: round by round, in it chunk by chunk."""
    sizes = round_sizes(placement.num_ranks, num_microbatches)
    chunks = np.tile(np.arange(placement.num_chunks), len(sizes))
    return np.repeat(chunks, np.repeat(sizes, placement.num_chunks))


def interleaved(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """Bubble (p - 1) / (v m + p - 1) for p ranks, v chunks and m microbatches, a multiple of p."""
    p, v = placement.num_ranks, placement.num_chunks
    order = round_order(placement, num_microbatches)
    forward, backward = of_chunks(F(), order), of_chunks(B(), v - 1 - order)
    # (v - 1) * r + 2 * (p - 1 - rank) times F, r = size of the first round: all but the last chunk of the first round, and two
    # more for every rank between here and the last
    num_warmup = min(v * num_microbatches, (v - 1) * round_sizes(p, num_microbatches)[0] + 2 * (p - 1 - rank))
    num_steady = v * num_microbatches - num_warmup
    return [
        forward[:num_warmup],  # warm-up
        in_turn(forward[num_warmup:], backward[:num_steady]),  # steady: F B
        backward[num_steady:],  # cool-down
    ]
