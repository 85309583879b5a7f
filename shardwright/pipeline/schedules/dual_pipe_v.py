"""DualPipeV: in a V, forwards of one chunk run together with backwards of the other, which hides what their layers wait
for.

Under tensor parallelism (or with experts on other ranks) a layer waits for other ranks several times, in its forward
and in its backward. An FB computes one while the other waits. Every stage is about as long as any other, so all ranks
reach their pairs at the same time. Where nothing is waited for, the two of a pair run one after the other
(`actions.separate`).
"""

from __future__ import annotations

import numpy as np

from ..planning.placement import Placement
from .phases import FB, B, F, I, Letters, W, in_turn, of_chunks, times


def dual_pipe_v(placement: Placement, rank: int, num_microbatches: int) -> list[Letters]:
    """At most 2 p + 1 live half-size activations, 2 p where pairs are separate.

    The phases need 2 p microbatches to mesh. Fewer are planned as if there were as many, and those that do not exist
    are left out.
    """
    p, m = placement.num_ranks, max(num_microbatches, 2 * placement.num_ranks)
    below = p - 1 - rank  # ranks between this one and the turn
    pairs = m - 2 * p + rank + 1
    # backwards at the end whose weight gradients are not put off; of the chunk that comes first one more
    whole = (rank + 1) // 2
    odd = rank % 2
    # chunks in the order in which they are
    late = np.array([0] * (1 - odd) + [1, 0] * ((rank + odd) // 2) + [0] * below)
    first = times(1, F(0), B(1), FB(1), B(0)) if below == 0 else times(1, FB(0), B(1), FB(1), B(0))
    return [
        times(2 * below, F(0)),  # down, until the first microbatch is back from the turn
        times(rank + 1, F(0), F(1)),  # down and up
        times(below, I(1), W(1), F(1)),  # first gradients
        first,  # the turn has nothing to pair yet
        times(pairs - 1, FB(0), B(1), FB(1), B(0)),  # steady
        times(below, B(1), FB(1), B(0)),  # the forwards of chunk 0 have ended
        times(whole, B(1), B(0)),  # gradients up and down
        times(1 - odd, B(1), I(0)),
        times((rank + odd) // 2, I(1), I(0)),  # the same, their weight gradients put off
        in_turn(of_chunks(W(), late[:below]), times(below, I(0))),  # gradients down
        of_chunks(W(), late[below:]),  # the rest
    ]
