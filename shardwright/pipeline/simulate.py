"""Dry run of a schedule: when every action would start and end, how long ranks wait, how much they hold.

Times are in the unit of the costs. The simulation follows the data (an action starts when its rank is free and its input has
arrived), so it needs no clock and no event queue, and it finds the schedules that would wait for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .actions import COMPUTE, Action, Kind, table
from .placement import Placement
from .schedules import Schedule


@dataclass(frozen=True)
class Costs:
    """Cost of the actions of a stage: one number for all stages, or one per stage.

    forward, input_grad, weight_grad  of F, I and W; B costs input_grad + weight_grad
    transfer                          time between the end of an action and the arrival of its result on another rank
    overlap                           False: a rank that sends can do nothing else meanwhile
    """

    forward: float | Sequence[float] = 1.0
    input_grad: float | Sequence[float] = 1.0
    weight_grad: float | Sequence[float] = 1.0
    transfer: float = 0.0
    overlap: bool = True

    def of_kind(self, num_stages: int) -> dict[Kind, list[float]]:
        """Cost by kind and stage."""

        def per_stage(name: str) -> list[float]:
            value: float | Sequence[float] = getattr(self, name)
            values = [float(value)] * num_stages if isinstance(value, int | float) else [float(v) for v in value]
            if len(values) != num_stages:
                raise ValueError(f"Costs.{name} has {len(values)} entries for {num_stages} stages; give one per stage or one number")
            if min(values) < 0:
                raise ValueError(f"Costs.{name} has the negative entry {min(values)}")
            return values

        forward, input_grad, weight_grad = map(per_stage, ("forward", "input_grad", "weight_grad"))
        both = [i + w for i, w in zip(input_grad, weight_grad, strict=True)]
        return {Kind.F: forward, Kind.I: input_grad, Kind.W: weight_grad, Kind.B: both}


class Span(NamedTuple):
    action: Action
    start: float
    end: float


class Simulation(NamedTuple):
    """What a step would look like.

    makespan   from the start of the first action to the end of the last one
    bubble     part of the ranks' time that is not spent computing, 1 - work / (ranks * makespan)
    peak_live  most microbatches (times chunks) whose activations a rank holds at once; they live from F to B or W
    spans      start and end of every compute action, by rank
    """

    makespan: float
    bubble: float
    peak_live: list[int]
    spans: list[list[Span]]


def peak_live(actions: Sequence[Action]) -> int:
    """Most activations that a rank with these actions holds at once; costs have no influence on it."""
    live = peak = 0
    for kind, _, _ in actions:
        if kind is Kind.F:
            live += 1
            peak = max(peak, live)
        elif kind is Kind.B or kind is Kind.W:
            live -= 1
    return peak


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run the compute actions of `schedule`; ValueError with the table when ranks wait for one another for ever."""
    costs = Costs() if costs is None else costs
    placement, lists = schedule
    cost = costs.of_kind(placement.num_stages)
    spans = _run(placement, lists, cost, costs)
    makespan = max((rank_spans[-1].end for rank_spans in spans if rank_spans), default=0.0)
    work = sum(cost[action.kind][action.stage] for rank_spans in spans for action, _, _ in rank_spans)
    bubble = 1 - work / (placement.num_ranks * makespan) if makespan else 0.0
    return Simulation(makespan, bubble, [peak_live(actions) for actions in lists], spans)


def _run(placement: Placement, lists: Sequence[Sequence[Action]], cost: dict[Kind, list[float]], costs: Costs) -> list[list[Span]]:
    last = placement.num_stages - 1
    rank_of = [placement.rank_of(stage) for stage in range(placement.num_stages)]
    compute = [[action for action in actions if action.kind in COMPUTE] for actions in lists]
    # Arrival of the input of (stage, microbatch) by direction; the first stage's inputs and the last one's gradients exist.
    forward_arrival: dict[tuple[int, int], float] = {}
    backward_arrival: dict[tuple[int, int], float] = {}
    waiting_forward: dict[tuple[int, int], int] = {}  # input that has not arrived -> rank that is stuck on it
    waiting_backward: dict[tuple[int, int], int] = {}
    spans: list[list[Span]] = [[] for _ in compute]
    clock = [0.0] * len(compute)
    runnable = list(range(len(compute)))
    while runnable:
        rank = runnable.pop()
        actions, rank_spans, now = compute[rank], spans[rank], clock[rank]
        while len(rank_spans) < len(actions):
            action = actions[len(rank_spans)]
            kind, stage, microbatch = action
            start = now
            if kind is Kind.F:
                if stage > 0:
                    arrival = forward_arrival.get((stage, microbatch))
                    if arrival is None:
                        waiting_forward[stage, microbatch] = rank
                        break
                    start = max(now, arrival)
            elif kind is not Kind.W and stage < last:
                arrival = backward_arrival.get((stage, microbatch))
                if arrival is None:
                    waiting_backward[stage, microbatch] = rank
                    break
                start = max(now, arrival)
            now = end = start + cost[kind][stage]
            rank_spans.append(Span(action, start, end))
            if kind is Kind.W:
                continue
            target = stage + 1 if kind is Kind.F else stage - 1
            if not 0 <= target <= last:
                continue
            if rank_of[target] != rank:
                end += costs.transfer
                if not costs.overlap:
                    now = end
            arrivals, waiting = (forward_arrival, waiting_forward) if kind is Kind.F else (backward_arrival, waiting_backward)
            arrivals[target, microbatch] = end
            stuck = waiting.pop((target, microbatch), None)
            if stuck is not None:
                runnable.append(stuck)
        clock[rank] = now
    for rank, (actions, rank_spans) in enumerate(zip(compute, spans, strict=True)):
        if len(rank_spans) < len(actions):
            step = len(rank_spans)
            raise ValueError(f"deadlock: rank {rank} waits for ever at {actions[step]}\n{table(compute, (rank, step))}")
    return spans
