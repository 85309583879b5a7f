"""Pipelines of hundreds of ranks and thousands of microbatches, and that what makes them fast changes no result."""

from __future__ import annotations

import random
import sys
import tracemalloc
from bisect import bisect_left
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from shardwright.pipeline import schedules
from shardwright.pipeline.cut.plan import CutModel
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.planning.actions import Action, Kind, table
from shardwright.pipeline.planning.lowering import MESSAGE, lower
from shardwright.pipeline.planning.placement import Placement
from shardwright.pipeline.planning.simulate import Costs, simulate
from shardwright.pipeline.schedules import Schedule
from shardwright.pipeline.settings import PipelineSettings

CASES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("eager_1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zb", 1),
    ("zbv", 2),
    ("dualpipev", 2),
]
LINES_OF_AN_ACTION = 6  # that are run for an action in the mean, when one rank's list is made


@pytest.mark.parametrize(
    ("style", "ranks", "chunks"),
    [
        ("1f1b", 512, 1),
        ("interleaved", 256, 2),
        ("zbv", 256, 2),
        pytest.param("dualpipev", 256, 2, marks=pytest.mark.sweep),
    ],
)
def test_512_stages_and_4096_microbatches_fit(style: str, ranks: int, chunks: int) -> None:
    """Built, simulated and lowered for one rank under 1 GiB."""
    tracemalloc.start()
    try:
        rank = ranks // 3
        schedule = schedules.get(style, ranks, 4096, chunks)
        lowered = lower(schedule, rank=rank)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**30
    split = {"zbv": 512 * 4096, "dualpipev": 256 * 256 + 256 * 255 // 2}.get(style, 0)  # backwards in two parts
    assert sum(map(len, schedule.actions)) == 512 * 4096 * 2 + split
    assert len(lowered.actions[rank]) == len(schedule.actions[rank]) + chunks * (4 * 4096 + 1)


@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2)])
def test_the_work_grows_as_the_schedule_does(style: str, chunks: int) -> None:
    """In lines of Python, which no busy machine changes: twice the microbatches or ranks, twice the lines."""

    def lines(ranks: int, num_microbatches: int) -> int:
        count = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            lower(schedules.get(style, ranks, num_microbatches, chunks), rank=ranks // 3)
        finally:
            sys.settrace(before)
        return count

    once = lines(16, 128)
    assert once < LINES_OF_AN_ACTION * 16 * 128 * chunks * 2
    assert lines(16, 256) < 2.1 * once
    assert lines(32, 128) < 2.1 * once


def test_an_error_at_scale_shows_the_ranks_beside_it() -> None:
    schedule = lower(schedules.get("1f1b", 40, 50), rank=20)
    lines = table(schedule.actions, (20, 3), context=2).splitlines()
    assert lines[0] == "ranks 18 to 22 of 40"
    assert lines[1].split() == ["step", *(word for rank in range(18, 23) for word in ("rank", str(rank)))]
    assert sum("ERROR HERE" in line for line in lines) == 1
    assert lines[2] == "... 1 earlier steps"
    assert set(schedule.actions._lists) == set(range(18, 23)), "no other list was made"  # type: ignore[attr-defined]


def test_schedules_of_ever_new_batches_are_let_go_of() -> None:
    staged: Any = SimpleNamespace(model=None)
    executor = PipelineExecutor(CutModel(staged, Placement(1), (), 0), PipelineSettings())
    kept = executor._schedule(2, True)
    for number in range(1, 30):
        executor._schedule(number, True)
        assert executor._schedule(2, True) is kept, "the one that comes again and again is kept"
    assert executor._schedule.cache_info().currsize == 8


def test_times_and_lists_equal_a_walk_action_by_action() -> None:
    """The whole world one action after the other, as anyone would write it first."""
    rng = random.Random(3)
    for style, v in CASES:
        for p in (1, 2, 3, 5):
            for m in (1, 2, 5, 9):
                stages = p * v
                forward, input_grad, weight_grad = (
                    [rng.choice([0.5, 1.0, 2.0, rng.random() + 0.1]) for _ in range(stages)] for _ in "FIW"
                )
                costs = Costs(forward, input_grad, weight_grad, rng.choice([0.0, 0.3, 2.5]), rng.random() < 0.5, 0.25)
                schedule = schedules.get(style, p, m, v, forward_only=rng.random() < 0.3)
                times = walk(schedule, costs)
                simulated = simulate(schedule, costs)
                assert simulated.spans == [
                    [(action, *times[action]) for action in actions] for actions in schedule.actions
                ]
                assert simulated.makespan == max(end for _, end in times.values())
                for overlap in (False, True):
                    if overlap and not costs.transfer:
                        times = walk(schedule, replace(costs, transfer=MESSAGE * min(forward)))
                    wanted = lower_all(schedule, times, overlap)
                    for rank in rng.sample(range(p), p):
                        assert lower(schedule, overlap, costs, rank).actions[rank] == wanted[rank], (
                            style,
                            p,
                            m,
                            v,
                            overlap,
                            rank,
                        )


def produced_by(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions that one may wait for, of which the schedule has one."""
    kind, stage, microbatch = action
    if kind in (Kind.F, Kind.FB):
        return (Action(Kind.F, stage - 1, microbatch), Action(Kind.FB, stage - 1, microbatch)) if stage else ()
    if kind is Kind.W or stage == num_stages - 1:
        return ()
    return (Action(Kind.B, stage + 1, microbatch), Action(Kind.I, stage + 1, microbatch))


def consumer(action: Action, placement: Placement) -> int | None:
    """The stage on another rank that waits for what an action makes."""
    target = action.stage + {Kind.F: 1, Kind.FB: 1, Kind.W: placement.num_stages}.get(action.kind, -1)
    return (
        target
        if 0 <= target < placement.num_stages and placement.rank_of(target) != placement.rank_of(action.stage)
        else None
    )


def walk(schedule: Schedule, costs: Costs) -> dict[Action, tuple[float, float]]:
    """Start and end of every action."""
    placement = schedule.placement
    cost = costs.of_kind(placement.num_stages)
    lists = [list(actions) for actions in schedule.actions]
    clock = [0.0] * len(lists)
    times: dict[Action, tuple[float, float]] = {}
    arrivals: dict[Action, float] = {}
    free: dict[tuple[int, int], float] = {}  # channels
    while any(lists):
        for rank, actions in enumerate(lists):
            while actions:
                together = actions[: 2 if actions[0].kind is Kind.FB else 1]
                needed = [produced_by(action, placement.num_stages) for action in together]
                made = [source for sources in needed for source in sources if source in times]
                if len(made) < sum(map(bool, needed)):
                    break
                start = clock[rank]
                for source in made:
                    start = max(start, arrivals[source])
                takes = sum(cost[action.kind][action.stage] for action in together)
                clock[rank] = end = start + takes * (1 - costs.hidden if len(together) == 2 else 1)
                for action in together:
                    times[actions.pop(0)] = (start, end)
                    arrivals[action] = end
                    if (target := consumer(action, placement)) is not None:
                        channel = rank, placement.rank_of(target)
                        arrivals[action] = free[channel] = max(end, free.get(channel, 0.0)) + costs.transfer
                        clock[rank] = clock[rank] if costs.overlap else max(clock[rank], arrivals[action])
    return times


def lower_all(schedule: Schedule, times: dict[Action, tuple[float, float]], overlap: bool) -> list[list[Action]]:
    """Lists of all ranks, filled in the global order of transfers."""
    placement = schedule.placement
    lists = [list(actions) for actions in schedule.actions]
    transfers = []
    for rank, actions in enumerate(lists):
        for index, action in enumerate(actions):
            if (target := consumer(action, placement)) is not None:
                forward = action.kind in (Kind.F, Kind.FB)
                send, receive = (Kind.SEND_F, Kind.RECV_F) if forward else (Kind.SEND_B, Kind.RECV_B)
                transfers.append(
                    (
                        times[action][1],
                        action.stage,
                        index + (2 if action.kind is Kind.FB else 1),
                        rank,
                        action._replace(kind=send),
                        Action(receive, target, action.microbatch),
                    )
                )
    gaps: list[list[list[Action]]] = [[[] for _ in range(len(actions) + 1)] for actions in lists]
    for time_of, _, behind, rank, send_action, receive_action in sorted(transfers, key=lambda transfer: transfer[:3]):
        gaps[rank][behind].append(send_action)
        receiver = placement.rank_of(receive_action.stage)
        before = bisect_left([times[action][0] for action in lists[receiver]], time_of)
        if overlap and before > 0 and time_of < times[lists[receiver][before - 1]][1]:
            before -= 1
        if before > 0 and lists[receiver][before - 1].kind is Kind.FB:
            before -= 1  # in front of a pair
        gaps[receiver][before].append(receive_action)
    lowered = []
    for actions, own in zip(lists, gaps, strict=True):
        final = {action.stage: index for index, action in enumerate(actions) if action.kind in (Kind.B, Kind.W)}
        result: list[Action] = []
        for index, gap in enumerate(own):
            result += gap
            result += [Action(Kind.REDUCE, stage) for stage, last in final.items() if last + 1 == index]
            result += actions[index : index + 1]
        lowered.append(result)
    return lowered
