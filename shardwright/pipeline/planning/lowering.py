"""From compute-only schedules to what the runtime executes: SEND, RECV, REDUCE, GATHER and FREE are derived; OFFLOAD
and RELOAD are placed by `offload_places`.

[Note: why lowered schedules cannot deadlock]
Simulate all ranks. Every transfer has a time: the end of the action that produced the data. SEND stands right after
this action, and RECV

    overlap=False  after the actions of the receiver that start before this time, so before its next one
    overlap=True   after the actions of the receiver that end by this time, so before the one it is then busy with: the
                   data arrives while it computes, and is waited for only by the action that needs it

In both cases there is one global order of which every rank's list is a part: transfers by their time, and compute
actions by their start (without overlap) or their end (with it). The action that produced the data comes before the
transfer in this order, and the one that needs it after. A pair (FB and the B behind it) is one action: what it makes
leaves behind both, what it needs comes before both. So whatever blocks, the first entry of the global order that has
not run can always run: even where SEND blocks until the receiver stands at RECV, as rendezvous protocols do, or where
all transfers of a rank share one queue, as on an NCCL communicator.

Results are the same either way: the order of the compute actions is.

[Note: how long messages take]
With overlap a message is taken to need some time, where the costs do not say how much. Were it to need none, what one
rank ends and what another begins would come at the same moment everywhere, and receives would be posted behind sends
that in reality come later: in a replay of interleaved x 2 (8 ranks, 32 microbatches, messages of a tenth of a forward)
that made a bubble of 15.8 % where the simulator has 12.3 %. How long they are taken to need hardly matters: from a
fiftieth of a forward to a fifth the replay has 12.3 %.

All ranks have to be simulated, but only the lists that are looked at are made: a rank's own, and in an error those
beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..schedules import Schedule
from .actions import KINDS, NEEDS_WEIGHTS, Action, ActionList, Kind
from .offload_places import with_offloads
from .simulate import Costs, Run, simulate

MESSAGE = 1 / 16  # of a forward, where nothing better is known

_SENDS = {Kind.F: Kind.SEND_F, Kind.FB: Kind.SEND_F, Kind.B: Kind.SEND_B, Kind.I: Kind.SEND_B}
_RECEIVES = {Kind.F: Kind.RECV_F, Kind.FB: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


def lower(
    schedule: Schedule,
    overlap: bool = True,
    costs: Costs | None = None,
    rank: int | None = None,
    gathered: int | None = None,
    offloaded: Sequence[float] | None = None,
) -> Schedule:
    """Add SEND_F, RECV_F, SEND_B, RECV_B and REDUCE to the compute actions, GATHER and FREE where `gathered` is given,
    and OFFLOAD and RELOAD where `offloaded` is.

    overlap  place receives so that they run while the rank computes, else blocking order (see the note above)
    costs    of the stages, when they are known to be unequal: receives are placed by them
    rank     whose list is wanted: it is made at once and the times of all ranks are let go of. Lists of others, which
             an error shows, can still be had; they take another simulation
    gathered  of how many of its stages a rank has the weights at once, those that it needs next; None: of all, always
    offloaded  share of the activations, by stage, that waits in host memory
    """
    costs = Costs() if costs is None else costs
    of_kind = costs.of_kind(schedule.placement.num_stages)
    if min(min(values) for values in of_kind.values()) <= 0:
        raise ValueError("lowering orders transfers by time and needs costs above 0")
    if overlap and costs.transfer == 0:  # see [Note: how long messages take]
        costs = replace(costs, transfer=MESSAGE * min(of_kind[Kind.F]))
    lists = _Lowered(schedule, overlap, costs, gathered, offloaded)
    if rank is not None:
        lists.make(rank)
    return Schedule(schedule.placement, lists)


class _Lowered(Sequence[Sequence[Action]]):
    """Lists of all ranks, each made when it is first looked at."""

    def __init__(
        self, schedule: Schedule, overlap: bool, costs: Costs, gathered: int | None, offloaded: Sequence[float] | None
    ) -> None:
        self._schedule, self._overlap, self._costs = schedule, overlap, costs
        self._gathered, self._offloaded = gathered, offloaded
        self._run: Run | None = None
        self._lists: dict[int, list[Action]] = {}

    def __len__(self) -> int:
        return self._schedule.placement.num_ranks

    def __getitem__(self, rank: int) -> list[Action]:  # type: ignore[override]  # nobody slices ranks
        if not 0 <= rank < len(self):
            raise IndexError(rank)
        if rank not in self._lists:
            self.make(rank, keep_times=True)
        return self._lists[rank]

    def __iter__(self) -> Iterator[list[Action]]:
        return (self[rank] for rank in range(len(self)))

    def make(self, rank: int, keep_times: bool = False) -> None:
        run = self._run if self._run is not None else simulate(self._schedule, self._costs).run
        lowered = list(_lower_rank(run, rank, self._overlap))
        if self._gathered is not None:
            lowered = with_gathers(lowered, self._gathered)
        if self._offloaded is not None:
            lowered = with_offloads(lowered, self._offloaded)
        self._lists[rank] = lowered
        self._run = run if keep_times else None


def _lower_rank(run: Run, rank: int, overlap: bool) -> ActionList:
    here = run.of(rank)
    mine, start, end, source = run.actions[here], run.start[here], run.end[here], run.source[here]
    count = len(mine)
    kinds, stages = mine.kinds, mine.stages
    joined = kinds == KINDS.index(Kind.FB)  # with the next one: the pair is one action here
    ranks_of = np.array([run.placement.rank_of(stage) for stage in range(run.placement.num_stages)])

    # Sends stand behind the action that made what they send.
    step = _neighbor(kinds)
    target = stages + step
    crosses = (step != 0) & (target >= 0) & (target < run.placement.num_stages)
    crosses[crosses] = ranks_of[target[crosses]] != rank
    sending = np.flatnonzero(crosses)
    # Receives stand before the first action that starts at the time of the transfer or later, with overlap before the
    # one that then runs.
    from_others = (source >= 0) & ((source < here.start) | (source >= here.stop))
    receiving = np.flatnonzero(from_others)
    made_by = source[receiving]
    time = run.end[made_by]
    before = np.searchsorted(start, time)
    if overlap:
        before -= (before > 0) & (time < end[np.maximum(before - 1, 0)])
        before -= (before > 0) & joined[np.maximum(before - 1, 0)]  # nothing stands inside of a pair

    sources = np.concatenate([here.start + sending, made_by])
    stays = np.concatenate([sending + 1 + joined[sending], before])
    transfers = ActionList(
        np.concatenate([_renamed(kinds[sending], _SENDS), _renamed(kinds[receiving], _RECEIVES)]),
        stages[np.concatenate([sending, receiving])],
        mine.microbatches[np.concatenate([sending, receiving])],
    )
    # A stage's gradients are complete behind its last B or W.
    final = {
        int(stage): place for place, stage in enumerate(stages.tolist()) if KINDS[kinds[place]] in (Kind.B, Kind.W)
    }
    reduce_at = np.array(sorted(final.values()), dtype=np.int64)

    # In every gap: transfers in the global order (by time; of the same time by stage, then by place), the REDUCE, the
    # action.
    gap = np.concatenate([stays, reduce_at + 1, np.arange(count)])
    group = np.repeat([0, 1, 2], [len(stays), len(reduce_at), count])
    rest = np.zeros(len(reduce_at) + count)
    moment = np.concatenate([run.end[sources], rest])
    sender = np.concatenate([run.actions.stages[sources], rest])
    place = np.concatenate([sources, rest])  # of one stage, so of one rank
    order = np.lexsort((place, sender, moment, group, gap))
    reduces = np.full(len(reduce_at), KINDS.index(Kind.REDUCE), dtype=np.int8)
    return ActionList(
        np.concatenate([transfers.kinds, reduces, kinds])[order],
        np.concatenate([transfers.stages, stages[reduce_at], stages])[order],
        np.concatenate([transfers.microbatches, np.full(len(reduce_at), -1, dtype=np.int32), mine.microbatches])[order],
    )


def _neighbor(kinds: NDArray[np.int8]) -> NDArray[np.int64]:
    """How many stages on a result is needed: 1 for F and FB, -1 for B and I, 0 for W."""
    return np.array([{Kind.F: 1, Kind.FB: 1, Kind.B: -1, Kind.I: -1}.get(kind, 0) for kind in KINDS])[kinds]


def _renamed(kinds: NDArray[np.int8], names: dict[Kind, Kind]) -> NDArray[np.int8]:
    return np.array([KINDS.index(names.get(kind, kind)) for kind in KINDS], dtype=np.int8)[kinds]


def with_gathers(actions: Sequence[Action], most: int) -> list[Action]:
    """`actions` of one rank with the weights of at most `most` of its stages gathered at once: of those that it needs
    next.

    A GATHER stands before the action from which on its stage is among these, so that it runs while others compute; a
    FREE behind the action that was the last for the time being. A pair has the weights of both of its stages, be `most`
    1 or not.
    """
    upcoming: list[list[int]] = []  # at every action the next stages that need their weights, soonest first
    following: list[int] = []
    behind: Action | None = None
    for action in reversed(actions):
        if action.kind in NEEDS_WEIGHTS:
            following = [action.stage, *(stage for stage in following if stage != action.stage)]
        if action.kind is Kind.FB:
            assert behind is not None
            upcoming[-1] = following[: max(most, len({action.stage, behind.stage}))]
            upcoming.append(upcoming[-1])
        else:
            upcoming.append(following[:most])
        behind = action
    upcoming.reverse()
    result: list[Action] = []
    held: list[int] = []
    for action, wanted in zip(actions, upcoming, strict=True):
        result += [Action(Kind.FREE, stage) for stage in held if stage not in wanted]
        held = [stage for stage in held if stage in wanted]
        for stage in wanted:
            if stage not in held:
                result.append(Action(Kind.GATHER, stage))
                held.append(stage)
        result.append(action)
    return result + [Action(Kind.FREE, stage) for stage in held]
