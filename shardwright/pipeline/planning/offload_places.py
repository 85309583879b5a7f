"""Which microbatches' activations wait in host memory, and where in a rank's list they go and come back.

    F5  OFFLOAD5  B2  F6  B3  F7  RELOAD5  B4  B5
        [ copy  ]    [ away     ] [   copy  ]

OFFLOAD stands right behind its F. The copy runs beside the next compute action; before the one after that the memory is
let go of. RELOAD stands before the last compute action in front of its B or I, so that its copy runs beside that one,
and no sooner, because memory is taken from then on. With k compute actions between F and B, memory is away during k - 2
of them: fewer than LEAST_GAP save nothing. A pair (FB and the B behind it) is one compute action here.

Of the microbatches of a stage that wait as long, the share that the user has asked for leaves, evenly spread, so that
it is the share of those that are held at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .actions import COMPUTE, KINDS, Action, ActionList, Kind

LEAST_GAP = 3  # compute actions between F and B, or I
_F, _B, _I, _FB = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.FB))
_COMPUTE = np.array([kind in COMPUTE for kind in KINDS])


class Leaving(NamedTuple):
    """Of the microbatches that leave, places among the compute actions of a rank. Of a pair the last place counts, for
    `back` the first.

    forward  their F
    behind   the same, with what runs beside it
    gone     the next action, beside which they are copied
    called   the action behind which the copy back starts
    back     the next one, beside which they are copied back: that before their B or I
    """

    forward: NDArray[np.int64]
    behind: NDArray[np.int64]
    gone: NDArray[np.int64]
    called: NDArray[np.int64]
    back: NDArray[np.int64]


def find_leaving(compute: ActionList, shares: Sequence[float]) -> Leaving:
    """Of the compute actions of one rank; `shares` by stage."""
    joined = compute.kinds == _FB
    forward = _by_microbatch(compute, (compute.kinds == _F) | joined)
    backward = _by_microbatch(compute, (compute.kinds == _B) | (compute.kinds == _I))
    if not len(backward):  # nothing is kept without a backward
        return Leaving(*[backward] * 5)
    number = np.arange(len(joined)) - (np.cumsum(joined) - joined)  # of every action, those of a pair together
    waits = number[backward] - number[forward] - 1 >= LEAST_GAP
    forward, backward = forward[waits], backward[waits]
    stages = compute.stages[forward]
    leaves = np.zeros(len(forward), dtype=bool)
    for stage in np.unique(stages).tolist():
        mine = np.flatnonzero(stages == stage)
        reached = np.floor(np.arange(len(mine) + 1) * shares[stage] + 1e-9)
        leaves[mine] = np.diff(reached) > 0
    forward, backward = forward[leaves], backward[leaves]
    first = np.flatnonzero(np.diff(number, prepend=-1))
    last = np.append(first[1:], len(number)) - 1
    start, end = number[forward], number[backward]
    return Leaving(forward, last[start], last[start + 1], last[end - 2], first[end - 1])


def _by_microbatch(compute: ActionList, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    places = np.flatnonzero(chosen)
    return places[np.lexsort((compute.microbatches[places], compute.stages[places]))]


def with_offloads(actions: Sequence[Action], shares: Sequence[float]) -> list[Action]:
    """`actions` of one rank with OFFLOAD and RELOAD for the given share of every stage's activations."""
    everything = ActionList.of(actions)
    places = np.flatnonzero(_COMPUTE[everything.kinds])
    found = find_leaving(everything[places], shares)
    behind, before = dict[int, Action](), dict[int, Action]()
    for forward, end, back in zip(found.forward.tolist(), found.behind.tolist(), found.back.tolist(), strict=True):
        _, stage, microbatch = everything[int(places[forward])]
        behind[int(places[end])] = Action(Kind.OFFLOAD, stage, microbatch)
        before[int(places[back])] = Action(Kind.RELOAD, stage, microbatch)
    result: list[Action] = []
    for place, action in enumerate(everything):
        if place in before:
            result.append(before[place])
        result.append(action)
        if place in behind:
            result.append(behind[place])
    return result
