"""Schedules whose microbatches are cut into slices of the sequence.

Forwards take the slices of a microbatch in their order, since attention looks back; backwards in the opposite one,
since the gradient of a key is complete when all later slices have given theirs. So the first backward of a microbatch
needs the forward of its last slice, and any schedule that is right for whole microbatches becomes right for slices
where its forwards are far enough ahead: by c - 1 for c slices in 1F1B. A rank then holds as much as p - rank + c - 1
slices, (p - rank + c - 1) / c microbatches, and the bubble is that of m c microbatches.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import schedules
from ..schedules import Schedule
from .actions import KINDS, ActionList, Kind
from .simulate import simulate

_F, _FB = KINDS.index(Kind.F), KINDS.index(Kind.FB)


def get_sliced(
    pp_style: str,
    num_ranks: int,
    num_microbatches: int,
    num_slices: int,
    num_model_chunks: int = 1,
    forward_only: bool = False,
    pairs: bool = True,
) -> Schedule:
    """The schedule named `pp_style` for `num_microbatches` of `num_slices` each: slice j of microbatch i has the
    number i c + j.
    """
    count = num_microbatches * num_slices
    schedule = schedules.get(pp_style, num_ranks, count, num_model_chunks, forward_only, pairs)
    if forward_only or num_slices == 1:
        return schedule
    lists = [_last_slice_first(ActionList.of(actions), num_slices) for actions in schedule.actions]
    least = max(map(_least_ahead, lists))
    for ahead in range(least, count * num_model_chunks):
        sliced = Schedule(schedule.placement, [_with_forwards_ahead(actions, ahead) for actions in lists])
        if _can_run(sliced):
            return sliced
    return Schedule(schedule.placement, [_with_forwards_ahead(actions, count * num_model_chunks) for actions in lists])


def _can_run(schedule: Schedule) -> bool:
    """Whether no rank waits for ever, and no forward is paired with its own backward."""
    for actions in map(ActionList.of, schedule.actions):
        paired = np.flatnonzero(actions.kinds == _FB)
        same = (actions.stages[paired] == actions.stages[paired + 1]) & (
            actions.microbatches[paired] == actions.microbatches[paired + 1]
        )
        if same.any():
            return False
    try:
        simulate(schedule)
    except ValueError:
        return False
    return True


def _last_slice_first(actions: ActionList, num_slices: int) -> ActionList:
    microbatches, slices = np.divmod(actions.microbatches, num_slices)
    back = (microbatches * num_slices + num_slices - 1 - slices).astype(np.int32)
    return ActionList(actions.kinds, actions.stages, np.where(_forwards(actions), actions.microbatches, back))


def _forwards(actions: ActionList) -> NDArray[np.bool_]:
    return (actions.kinds == _F) | (actions.kinds == _FB)


def _least_ahead(actions: ActionList) -> int:
    """How many more forwards must have run everywhere for every other action to come behind its own forward."""
    forward = _forwards(actions)
    done = np.cumsum(forward)  # up to and with each action
    names = actions.stages.astype(np.int64) << 32 | actions.microbatches
    order = np.argsort(names[forward])
    # of the forward that an action needs, among forwards
    place = order[np.searchsorted(names[forward], names[~forward], sorter=order)]
    return int((place + 1 - done[~forward]).max(initial=0))


def _with_forwards_ahead(actions: ActionList, ahead: int) -> ActionList:
    """The first `ahead` forwards come before everything else, and where one stood stands the one that is as many
    further on.
    """
    places = np.flatnonzero(_forwards(actions))
    if ahead == 0:
        return actions
    first, kinds = places[:ahead], actions.kinds.copy()
    stages, microbatches = actions.stages.copy(), actions.microbatches.copy()
    filled, empty = places[: len(places) - len(first)], places[len(places) - len(first) :]
    stages[filled], microbatches[filled] = actions.stages[places[ahead:]], actions.microbatches[places[ahead:]]
    stays = np.ones(len(kinds), dtype=bool)
    stays[empty] = False
    return ActionList(
        np.concatenate([np.full(len(first), _F, dtype=np.int8), kinds[stays]]),
        np.concatenate([actions.stages[first], stages[stays]]),
        np.concatenate([actions.microbatches[first], microbatches[stays]]),
    )
