"""Interleaved 1F1B: several chunks per rank, a bubble smaller by their number.

The microbatches are run in rounds: a round takes its microbatches through chunk 0, then through chunk 1, and so on.

[Note: rounds where the microbatches are no multiple of the ranks]
A round of at least p microbatches never waits for itself, because the first one is back from the last rank by the time
the rank has finished with the last one: a multiple of p takes the classical rounds of p, in which a rank holds up to

    limit = (v - 1) p + 2 (p - 1) + 1 chunks

of microbatches. Other numbers could take m // p longer rounds, but a round of r holds (v - 1) (r - p) more. So they do
only while that is at most an eighth, or one chunk, over the limit. Beyond it there are ceil(m / p) rounds of at most p,
which keep the limit and cost little:

    warm-up and cool-down are where a short round is waited for: there the long ones stand, first of the forwards, last
    of the backwards in between a short round passes without waiting if it has p / 3 forwards or 2 p / 3 backwards, as a
    backward takes as long as two forwards. Where there are rounds enough, the short ones come in the middle, in both
    directions alike; else the rounds of forwards begin with long ones and those of backwards end with long ones
    short rounds leave less time for a microbatch to come back, so the warm-up is less deep: between one and two
    forwards per rank

For p of 2 to 6, 8, 11, 16, v of 2, 3, 4, 6, 8, and m from p to 6 p this never takes longer than microbatches padded to
whole rounds, and as long as the best there is, 3 (v m + p - 1) slots, in all but 61 of some 1400 cases. Those have many
chunks and few microbatches: for v = 4 at most 8 % are lost, for v = 8 at m = 1.3 p 20 %. Example p = 8, v = 4: m = 15
holds 38 chunks in place of the 60 of one long round, at the best time; m = 12 holds 33 in place of 44 and takes 174
slots in place of 165.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..planning.placement import Placement
from .phases import B, F, Letters, in_turn, of_chunks


def interleaved(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """Bubble (p - 1) / (v m + p - 1) for p ranks, v chunks and m microbatches, a multiple of p. Others: see the note
    above.
    """
    p, v, m = placement.num_ranks, placement.num_chunks, num_microbatches
    forward_sizes, backward_sizes = rounds(p, v, m)
    down, up = chunks_of(forward_sizes, v), v - 1 - chunks_of(backward_sizes, v)
    behind = depth(down, up)
    ahead = eagerness(p, v, behind, min(forward_sizes) + min(backward_sizes)) * (p - 1 - rank) // max(1, p - 1)
    num_warmup = min(v * m, behind + ahead)
    num_steady = v * m - num_warmup
    forward, backward = of_chunks(F(), down), of_chunks(B(), up)
    return [
        forward[:num_warmup],  # warm-up
        in_turn(forward[num_warmup:], backward[:num_steady]),  # steady: F B
        backward[num_steady:],  # cool-down
    ]


def limit(p: int, v: int) -> int:
    """Most chunks of microbatches that a rank holds in the classical schedule."""
    return (v - 1) * p + 2 * (p - 1) + 1


def rounds(p: int, v: int, m: int) -> tuple[list[int], list[int]]:
    """Sizes of the rounds of forwards and of backwards, see the note above."""
    longer = even(m, max(1, m // p))
    if m <= p or (v - 1) * longer[0] + p <= max(limit(p, v) * 9 // 8, limit(p, v) + 1):
        return longer, longer
    number = -(-m // p)
    middle = even(m - 2 * p, number - 2) if number > 2 else []
    alike = [p, *middle, p] if middle else even(m, number)
    if 3 * min(middle, default=0) < 2 * p:
        first = min(p, m - (number - 1) * -(-p // 3))
        last = min(p, m - (number - 1) * -(-2 * (p - 1) // 3))
        forward, backward = [first, *even(m - first, number - 1)], [*even(m - last, number - 1)[::-1], last]
        if depth(chunks_of(forward, v), v - 1 - chunks_of(backward, v)) + p <= limit(p, v):
            return forward, backward
    return alike, alike


def depth(down: NDArray[np.int64], up: NDArray[np.int64]) -> int:
    """How many forwards the first backward comes behind, so that each comes behind its own; chunks in the order of
    both are given.
    """
    return int((np.argsort(down, kind="stable") - np.argsort(up, kind="stable")).max())


def eagerness(p: int, v: int, behind: int, shortest: int) -> int:
    """Forwards that rank 0 is ahead of the last one: two per rank hide transfers, one is the least that keeps all ranks
    busy.

    A microbatch has `shortest` actions' time, that of the shortest rounds down and up, to go down and come back.
    """
    return max(p - 1, min(2 * (p - 1), shortest - 1, limit(p, v) - 1 - behind))


def even(total: int, number: int) -> list[int]:
    """`total` in `number` parts that are as even as possible, larger ones first."""
    size, larger = divmod(total, number)
    return [size + 1] * larger + [size] * (number - larger)


def chunks_of(sizes: list[int], num_chunks: int) -> NDArray[np.int64]:
    """Chunks in the order in which forwards meet them: round by round, in it chunk by chunk."""
    return np.repeat(np.tile(np.arange(num_chunks), len(sizes)), np.repeat(sizes, num_chunks))
