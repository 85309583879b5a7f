"""Dry run of a schedule: when every action would start and end, how long ranks wait, how much they hold.

Times are in the unit of the costs. The simulation follows the data (an action starts when its rank is free and its
input has arrived), so it needs no clock and no event queue, and it finds the schedules that would wait for ever. All
ranks go on at once, by one action each per round where its input is there: a round is a few operations on arrays with
an entry per rank, so that 512 ranks take hardly longer than 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schedules import Schedule
from .actions import COMPUTE, KINDS, Action, ActionList, Kind, table
from .placement import Placement


@dataclass(frozen=True)
class Costs:
    """Cost of the actions of a stage: one number for all stages, or one per stage.

    forward, input_grad, weight_grad  of F, I and W; B costs input_grad + weight_grad
    hidden                            share of the F and the B of a pair (FB) that passes while the other one computes
    transfer                          time for which a message occupies its channel (`Placement.channels`): what is to
                                      travel in the same channel waits, and arrives this much later than it sets out.
                                      Per stage: of the message from it to the next one, and of that back; the last
                                      stage's is not used
    overlap                           False: a rank that sends can do nothing else meanwhile
    """

    forward: float | Sequence[float] = 1.0
    input_grad: float | Sequence[float] = 1.0
    weight_grad: float | Sequence[float] = 1.0
    transfer: float | Sequence[float] = 0.0
    overlap: bool = True
    hidden: float = 0.0

    def transfers(self, num_stages: int) -> NDArray[np.float64]:
        """[2, stages]: of the result of a stage's F, and of that of its B or I."""
        given = self.transfer
        down = [float(given)] * num_stages if isinstance(given, int | float) else [float(time) for time in given]
        return np.array([down, [0.0, *down[:-1]]])

    def of_kind(self, num_stages: int) -> dict[Kind, list[float]]:
        """Cost by kind and stage."""

        def per_stage(name: str) -> list[float]:
            value: float | Sequence[float] = getattr(self, name)
            values = [float(value)] * num_stages if isinstance(value, int | float) else [float(v) for v in value]
            if len(values) != num_stages:
                raise ValueError(
                    f"Costs.{name} has {len(values)} entries for {num_stages} stages; give one per stage or one number"
                )
            if min(values) < 0:
                raise ValueError(f"Costs.{name} has the negative entry {min(values)}")
            return values

        forward, input_grad, weight_grad = map(per_stage, ("forward", "input_grad", "weight_grad"))
        both = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
        return {Kind.F: forward, Kind.FB: forward, Kind.I: input_grad, Kind.W: weight_grad, Kind.B: both}

    def table(self, num_stages: int) -> NDArray[np.float64]:
        """Cost by number of the kind and stage; nan for what is no computation."""
        found = np.full((len(KINDS), num_stages), np.nan)
        for kind, values in self.of_kind(num_stages).items():
            found[KINDS.index(kind)] = values
        return found


_F, _B, _I, _W, _FB = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.FB))
_COMPUTE = np.array([kind in COMPUTE for kind in KINDS])


class Span(NamedTuple):
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """The compute actions of all ranks, one rank after the other, and when each runs.

    actions     of all ranks
    bounds      rank r has the places bounds[r] to bounds[r + 1]
    source      place of the action whose result an action needs; -1 where it needs none, -2 where no action makes it
    start, end  of every action; the two of a pair have the same
    """

    placement: Placement
    actions: ActionList
    bounds: NDArray[np.int64]
    source: NDArray[np.int64]
    start: NDArray[np.float64]
    end: NDArray[np.float64]

    def of(self, rank: int) -> slice:
        """The places of a rank."""
        return slice(int(self.bounds[rank]), int(self.bounds[rank + 1]))


@dataclass(frozen=True)
class Simulation:
    """What a step would look like.

    makespan   from the start of the first action to the end of the last one
    bubble     part of the ranks' time that is not spent computing, 1 - work / (ranks * makespan)
    peak_live  most microbatches (times chunks) whose activations a rank holds at once; they live from F to B or W
    run        all times
    """

    makespan: float
    bubble: float
    peak_live: list[int]
    run: Run

    @cached_property
    def spans(self) -> list[list[Span]]:
        """Start and end of every compute action, by rank."""
        run = self.run
        found = []
        for rank in range(run.placement.num_ranks):
            here = run.of(rank)
            found.append(list(map(Span, run.actions[here], run.start[here].tolist(), run.end[here].tolist())))
        return found


def peak_live(actions: Sequence[Action]) -> int:
    """Most activations that a rank with these actions holds at once; costs have no influence on it."""
    kinds = ActionList.of(actions).kinds
    live = np.cumsum(((kinds == _F) | (kinds == _FB)).astype(np.int32) - (kinds == _B) - (kinds == _W))
    return int(live.max(initial=0))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run the compute actions of `schedule`; ValueError with the table when ranks wait for one another for ever."""
    costs = Costs() if costs is None else costs
    run = _run(schedule, costs)
    makespan = float(run.end.max(initial=0.0))
    work = float((run.end - run.start)[run.actions.kinds != _FB].sum())
    bubble = 1 - work / (run.placement.num_ranks * makespan) if makespan else 0.0
    return Simulation(
        makespan, bubble, [peak_live(run.actions[run.of(rank)]) for rank in range(run.placement.num_ranks)], run
    )


def _run(schedule: Schedule, costs: Costs) -> Run:
    placement = schedule.placement
    lists = [_computing(actions) for actions in schedule.actions]
    bounds = np.cumsum([0, *map(len, lists)])
    actions = ActionList(
        np.concatenate([part.kinds for part in lists]),
        np.concatenate([part.stages for part in lists]),
        np.concatenate([part.microbatches for part in lists]),
    )
    rank_of = np.array([placement.rank_of(stage) for stage in range(placement.num_stages)])
    source, travels = _sources(actions, rank_of)
    cost = costs.table(placement.num_stages)[actions.kinds, actions.stages]
    forward = (actions.kinds == _F) | (actions.kinds == _FB)
    channel = _channels(placement)[np.where(travels, 2 - forward, 0), actions.stages]
    lag = np.where(travels, costs.transfers(placement.num_stages)[np.where(forward, 0, 1), actions.stages], 0.0)
    free_at = np.zeros(len(placement.channels) + 1)  # every channel; the last one is for what stays on its rank
    joined = actions.kinds == _FB  # with the next one
    has_pairs = bool(joined.any())
    pairs = np.flatnonzero(joined)
    cost[pairs] = (cost[pairs] + cost[pairs + 1]) * (1 - costs.hidden)

    # Two places behind the last: what is there from the start, and what never comes.
    count = len(actions)
    start, end, arrival = np.zeros(count), np.zeros(count), np.full(count + 2, np.inf)
    arrival[count] = 0.0
    needed = np.where(source >= 0, source, count - 1 - source)
    ranks = np.flatnonzero(bounds[:-1] < bounds[1:])  # that have something left to do,
    # their next action, their last and their time
    at, stop, clock = bounds[ranks], bounds[ranks + 1], np.zeros(len(ranks))
    while len(ranks):
        input_at = arrival[needed[at]]
        if has_pairs:
            with_next = joined[at]
            input_at = np.maximum(input_at, arrival[needed[at + with_next]])
        there = input_at < np.inf
        if not there.any():
            rank, step = int(ranks[0]), int(at[0] - bounds[ranks[0]])
            raise ValueError(
                f"deadlock: rank {rank} waits for ever at {lists[rank][step]}\n{table(lists, (rank, step))}"
            )
        now = at[there]
        begin = np.maximum(clock[there], input_at[there])
        done = begin + cost[now]
        lane = channel[now]  # a rank sends in channels of its own, so nobody else's message is under way in them
        arrived = np.maximum(done, free_at[lane]) + lag[now]
        start[now], end[now], arrival[now] = begin, done, arrived
        free_at[lane] = arrived
        free_at[-1] = 0.0
        clock[there] = done if costs.overlap else arrived
        at = at + there
        if has_pairs:
            pair = with_next & there
            first, second = at[pair] - 1, at[pair]
            start[second], end[second] = start[first], end[first]
            arrival[second] = free_at[channel[second]] = np.maximum(end[first], free_at[channel[second]]) + lag[second]
            free_at[-1] = 0.0
            if not costs.overlap:
                clock[pair] = np.maximum(clock[pair], arrival[second])
            at = at + pair
        left = at < stop
        if not left.all():
            ranks, at, stop, clock = ranks[left], at[left], stop[left], clock[left]
    return Run(placement, actions, bounds, source, start, end)


def _channels(placement: Placement) -> NDArray[np.int64]:
    """[3, num_stages]: number of the channel in which the result of a stage travels: of nothing, of F, of B and I."""
    numbers = {channel: number for number, channel in enumerate(placement.channels)}
    ranks = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    nowhere = len(numbers)
    down = [numbers.get(pair, nowhere) for pair in zip(ranks, [*ranks[1:], -1], strict=True)]
    up = [numbers.get(pair, nowhere) for pair in zip(ranks, [-1, *ranks[:-1]], strict=True)]
    return np.array([[nowhere] * len(ranks), down, up])


def _computing(actions: Sequence[Action]) -> ActionList:
    compact = ActionList.of(actions)
    return compact[_COMPUTE[compact.kinds]]


def _sources(actions: ActionList, rank_of: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For every action the place of the one whose result it needs (see `Run`), and whether its own result travels to
    another rank.
    """
    kinds, stages, microbatches = actions.kinds, actions.stages.astype(np.int64), actions.microbatches
    last = len(rank_of) - 1
    forward, backward = (kinds == _F) | (kinds == _FB), (kinds == _B) | (kinds == _I)
    source = np.full(len(actions), -1)
    travels = np.zeros(len(actions), dtype=bool)
    for mine, step in ((forward, 1), (backward, -1)):
        made_by = np.full((last + 1, int(microbatches.max(initial=0)) + 1), -2)
        made_by[stages[mine], microbatches[mine]] = np.flatnonzero(mine)
        waits = mine & (stages != (0 if step > 0 else last))
        source[waits] = made_by[stages[waits] - step, microbatches[waits]]
        sends = mine & (stages != (last if step > 0 else 0))
        travels[sends] = rank_of[stages[sends] + step] != rank_of[stages[sends]]
    return source, travels
