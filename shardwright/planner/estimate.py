"""Memory and time of a step of one layout, from what layers cost (`rates`): static bytes, what microbatches under way
leave, what actions need for a while; the schedule's simulator for the time, with communication that the runtime hides
taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ..pipeline.planning.memory import memory_curves
from ..pipeline.planning.rank_memory import SELECTIVE
from ..pipeline.planning.simulate import Costs, Simulation, simulate
from ..pipeline.schedules import STYLES, Schedule
from ..pipeline.schedules import get as get_schedule
from .machines import Machine
from .rates import Rates

_BUCKET = 2 * 12 * 2**20 * 4  # bytes of gradients on their way
_MESSAGES = 4  # under way at a time
_ROUNDS = 4  # of so many microbatches per rank is simulated; all others take what those between take
_BEHIND = 0.5  # share of a backward's collectives that weight gradients hide


@dataclass(frozen=True)
class Layout:
    """tp, pp, sp, dp   ranks
    zero              stage
    samples, count    of a microbatch, and microbatches
    whole, selective  shares of the layers that are recomputed
    """

    tp: int
    pp: int
    sp: int
    dp: int
    zero: int
    style: str
    chunks: int
    samples: int
    count: int
    whole: float = 0.0
    selective: float = 0.0


@dataclass(frozen=True)
class Task:
    """What is trained, on what.

    hidden      bytes of one sample between layers, whole
    half        whether weights have half precision, beside masters
    states      numbers that the optimizer keeps per element
    flops       of all forwards and backwards of a sample, on all ranks together
    """

    machine: Machine
    hidden: float
    half: bool
    states: float
    flops: float
    world_size: int


class Estimate(NamedTuple):
    """layout
    memory      bytes on the fullest rank
    seconds     of a step
    parts       of `seconds`: computing, waiting for the pipeline, and what of communication is not hidden, by axis
    mfu         share of the devices' peak that the model's products use
    simulated   False: by formulas only
    """

    layout: Layout
    memory: float
    seconds: float
    parts: dict[str, float]
    mfu: float
    simulated: bool = False


class Estimator:
    """Of one layout; `counts` are layers of every stage, where it is known how the model is cut."""

    def __init__(self, task: Task, rates: Rates, layout: Layout, counts: Sequence[int] | None = None) -> None:
        self._task, self._rates, self._layout = task, rates, layout
        self._given = counts

    # What stages hold and take. `stages` counts all chunks of all ranks.

    @cached_property
    def _stages(self) -> int:
        return self._layout.pp * self._layout.chunks

    @cached_property
    def _head(self) -> float:
        """What lies beside the layers, in layers."""
        layer, rest = self._rates.layer, self._rates.rest
        return (rest.forward + rest.backward) / max(layer.forward + layer.backward, 1e-12)

    @property
    def _most(self) -> int:
        """Layers of the largest stage."""
        return max(self._counts)

    def _samples(self, amount: float) -> float:
        """Of a microbatch, whose sequences sequence-parallel ranks share."""
        return amount * self._layout.samples / self._layout.sp

    @cached_property
    def _actions(self) -> tuple[float, float, float]:
        """Seconds of a layer's forward, backward, and of what of its backward can wait."""
        layer, layout, machine = self._rates.layer, self._layout, self._task.machine
        sent = [self._tensor(layer.sent, layer.calls), self._tensor(layer.sent_back, layer.calls_back) * _BEHIND]
        ring = self._sequence()
        forward = self._samples(layer.forward) + layer.start + sent[0] + ring
        backward = self._samples(layer.backward) + layer.start_back + sent[1] + ring
        backward += layout.whole * forward + layout.selective * (self._samples(layer.cheap) + layer.start / 2)
        if layout.zero == 3:  # gathered while others compute
            reach = layout.dp * layout.tp * layout.sp
            size = 2 * layer.parameters * (layout.dp - 1) / layout.dp
            gather = machine.sent(size, layout.dp, reach if layout.dp > 1 else 1)
            if layout.pp == 1:  # of a chunk they stay for the step
                forward, backward = max(forward, gather), max(backward, gather)
        return forward, backward, self._samples(layer.forward)

    def _tensor(self, sent: float, calls: float) -> float:
        layout, machine = self._layout, self._task.machine
        return (
            self._samples(sent) / (machine.inside * machine.sending) + calls * machine.latency if layout.tp > 1 else 0.0
        )

    def _sequence(self) -> float:
        """Of a layer: four exchanges of what a rank has."""
        layout, machine = self._layout, self._task.machine
        size = 4 * self._samples(self._task.hidden) / layout.tp
        return machine.sent(size, layout.sp, layout.tp * layout.sp) + 3 * machine.latency if layout.sp > 1 else 0.0

    @cached_property
    def _rest(self) -> tuple[float, float]:
        rest = self._rates.rest
        sent = [self._tensor(rest.sent, rest.calls), self._tensor(rest.sent_back, rest.calls_back)]
        return (
            self._samples(rest.forward) + rest.start + sent[0],
            self._samples(rest.backward) + rest.start_back + sent[1],
        )

    @cached_property
    def _counts(self) -> list[int]:
        """Layers of every stage, as the cut deals them: the last one has fewer, for its head, and the first ones."""
        layers, stages = self._rates.layers, self._stages
        if self._given is not None:
            return list(self._given)
        if stages == 1:
            return [layers]
        last = min(max(round((layers + self._head) / stages - self._head), 0), layers - stages + 1)
        each, more = divmod(layers - last, stages - 1)
        return [each + (index >= stages - 1 - more) for index in range(stages - 1)] + [last]

    # Time.

    def estimate(self, simulated: bool) -> Estimate:
        layout, machine = self._layout, self._task.machine
        forward, backward, late = self._actions
        computing = self._computing()
        length = self._simulated() if simulated and layout.pp > 1 else self._by_formula(forward, backward, late)
        parts = {"computing": computing, "pipeline": max(length - computing, 0.0)}
        parts |= self._data(backward)
        parameters = self._parameters()
        shared = parameters / (layout.dp if layout.zero else 1)
        parts["optimizer"] = shared * (4 + 8 + 8 * self._task.states + 2) / (machine.bandwidth * machine.moving)
        if machine.cores:  # which all ranks share
            busy = self._task.world_size * (computing + parts["optimizer"]) / machine.cores
            parts["sharing cores"] = max(busy - sum(parts.values()), 0.0)
        seconds = sum(parts.values())
        samples = layout.samples * layout.count * layout.dp
        mfu = self._task.flops * samples / (seconds * self._task.world_size * machine.flops)
        memory = self._memory(simulated)
        return Estimate(layout, memory, seconds, parts, mfu, simulated)

    def _computing(self) -> float:
        """Of a rank with its share of everything, all microbatches."""
        forward, backward, _ = self._actions
        whole = self._rates.layers * (forward + backward) + sum(self._rest)
        return self._layout.count * whole / self._layout.pp

    def _by_formula(self, forward: float, backward: float, late: float) -> float:
        layout = self._layout
        dearest = self._most * layout.chunks * (forward + backward)
        last = self._counts[-1] * (forward + backward) + sum(self._rest)
        if layout.pp == 1:
            return layout.count * (self._rates.layers * (forward + backward) + sum(self._rest))
        dearest = max(dearest, last)
        if STYLES[layout.style].splits:
            idle = dearest - 2 * self._most * layout.chunks * late
        else:
            idle = dearest
        return layout.count * dearest + (layout.pp - 1) * (idle / layout.chunks + 2 * self._message)

    @cached_property
    def _message(self) -> float:
        layout = self._layout
        size = self._samples(self._task.hidden) / (layout.tp if self._rates.along else 1)
        return self._task.machine.sent(size, layout.pp, layout.pp * layout.tp * layout.sp)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every stage's actions."""
        forward, backward, late = self._actions
        rest = self._rest
        counts = self._counts
        forwards = [count * forward for count in counts]
        grads = [count * (backward - late) for count in counts]
        weights = [count * late for count in counts]
        forwards[-1] += rest[0]
        grads[-1] += rest[1] / 2
        weights[-1] += rest[1] / 2
        return Costs(
            [max(each, 1e-9) for each in forwards],
            [max(each, 1e-9) for each in grads],
            [max(each, 1e-9) for each in weights],
            self._message,
        )

    @cached_property
    def _run(self) -> Simulation:
        return simulate(self._schedule[0], self.costs)

    def _simulated(self) -> float:
        layout = self._layout
        schedule, count = self._schedule
        makespan = self._run.makespan
        totals = np.array(self.costs.forward) + np.array(self.costs.input_grad) + np.array(self.costs.weight_grad)
        placement = schedule.placement
        dearest = max(float(sum(totals[stage] for stage in placement.stages_of(rank))) for rank in range(layout.pp))
        return makespan + (layout.count - count) * dearest

    @property
    def _schedule(self) -> tuple[Schedule, int]:
        layout = self._layout
        count = min(layout.count, _ROUNDS * layout.pp)
        return _schedule(layout.style, layout.pp, count, layout.chunks), count

    def _data(self, backward: float) -> dict[str, float]:
        """What of gradients and weights on their way is not hidden."""
        layout, machine = self._layout, self._task.machine
        if layout.dp * layout.sp < 2:
            return {}
        ranks = layout.dp * layout.sp
        parameters = self._parameters()
        share, reach = (ranks - 1) / ranks, self._task.world_size
        reduced = machine.sent(4 * parameters * share * (1 if layout.zero else 2), ranks, reach)
        # a pipeline reduces in every microbatch from stage 2 on, and other layouts at stage 3
        times = layout.count if layout.zero >= (2 if layout.pp > 1 else 3) else 1
        gathered = machine.sent(2 * parameters * share, ranks, reach) if layout.zero else 0.0
        if layout.zero == 3 and layout.pp == 1:
            gathered = 0.0  # layer by layer, with what they compute
        hidden = 0.9 * self._most * layout.chunks * backward
        return {"data": times * max(reduced - hidden, 0.0) + gathered}

    # Memory.

    def _parameters(self) -> float:
        """Elements of the first rank, which mostly has most of them."""
        layer, rest, layout = self._rates.layer, self._rates.rest, self._layout
        if layout.pp == 1:
            return self._rates.layers * layer.parameters + rest.parameters
        return self._counts[0] * layout.chunks * layer.parameters + rest.parameters / 2

    def _static(self, parameters: float) -> float:
        layout, task = self._layout, self._task
        sharing = layout.dp * layout.sp if layout.zero else 1
        itemsize = 2 if task.half else 4
        weights = itemsize * parameters if layout.zero < 3 else 0.0
        gradients = 4 * parameters / (sharing if layout.zero >= 2 else 1)
        masters = 4 * parameters / sharing if task.half or layout.zero == 3 else 0.0
        states = 4 * task.states * parameters / sharing
        if layout.zero == 3:  # gathered: two layers, or with a pipeline up to three chunks
            layer = self._rates.layer.parameters
            weights += itemsize * (3 * layer if layout.pp == 1 else min(3, layout.chunks) * self._most * layer)
        return weights + gradients + masters + states

    @cached_property
    def _kept(self) -> float:
        """Of a layer, of a microbatch."""
        layer, layout = self._rates.layer, self._layout
        inputs = self._task.hidden / (layout.tp if self._rates.along else 1)
        none = 1 - layout.whole - layout.selective
        return self._samples(layout.whole * inputs + layout.selective * SELECTIVE * layer.kept + none * layer.kept)

    @cached_property
    def _transient(self) -> tuple[float, float]:
        """Of the layers, and where the head is too."""
        layer, rest, layout = self._rates.layer, self._rates.rest, self._layout
        again = layer.kept if layout.whole or layout.selective else 0.0
        of_layers = max(layer.forward_top, layer.backward_top + again)
        return self._samples(of_layers), self._samples(max(of_layers, rest.forward_top, rest.backward_top))

    def _memory(self, simulated: bool) -> float:
        layout = self._layout
        besides: float = _BUCKET * (layout.dp * layout.sp > 1)
        layers, head = self._transient
        if layout.pp == 1:
            held = self._rates.layers * self._kept + self._samples(self._rates.rest.kept)
            return self._static(self._parameters()) + held + head + besides
        message = self._samples(self._task.hidden) / (layout.tp if self._rates.along else 1)
        besides += _MESSAGES * message
        if not simulated:
            ends = self._static(self._parameters())
            under_way = min(layout.count, layout.pp)
            held = under_way * self._counts[0] * layout.chunks * self._kept
            if layout.style == "interleaved":
                held *= 1 + (layout.pp - 1) / self._stages
            return ends + held + layers + besides
        schedule, _ = self._schedule
        kept = [count * self._kept for count in self._counts]
        kept[-1] += self._samples(self._rates.rest.kept)
        waiting = [count * self._samples(self._rates.layer.kept) * 0.8 for count in self._counts]
        deferred = waiting if STYLES[layout.style].splits else None
        curves = memory_curves(self._run.run, kept, deferred)
        last = schedule.placement.rank_of(self._stages - 1)
        found: list[float] = []
        for rank, curve in enumerate(curves):
            # what waits is bounded by what 1F1B's first rank would hold
            bound = max(float(curve.kept.max()), min(layout.count, layout.pp) * self._most * layout.chunks * self._kept)
            held = min(float(curve.peak), bound)
            own = sum(self._counts[stage] for stage in schedule.placement.stages_of(rank))
            parameters = own * self._rates.layer.parameters
            if rank in (0, last):
                parameters += self._rates.rest.parameters / (1 if last == 0 else 2)
            found.append(self._static(parameters) + held + (head if rank == last else layers) + besides)
        return max(found)


@lru_cache(maxsize=256)
def _schedule(style: str, ranks: int, count: int, chunks: int) -> Schedule:
    return get_schedule(style, ranks, count, chunks, pairs=False)
