"""Memory and time of a step of one layout, from what layers cost (`rates`): static bytes, what microbatches under way
leave, what actions need for a while; the schedule's simulator for the time, with communication that the runtime hides
taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from ..pipeline.planning.memory import memory_curves
from ..pipeline.planning.simulate import Costs, Simulation, simulate
from ..pipeline.schedules import STYLES, Schedule
from ..pipeline.schedules import get as get_schedule
from ..zero.layout import CUDA_BUCKET_BYTES
from .machines import Machine
from .operators import Operator
from .rates import PartCost, Rates
from .stages import Ends, dealt
from .states import NO_STEP, StepCost

_BUCKET = 2 * CUDA_BUCKET_BYTES  # of gradients on their way that are not reduced where they are, and most in a piece
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
    states      numbers of four bytes that the optimizer keeps per element
    flops       of all forwards and backwards of a sample, on all ranks together
    step        what a step of the optimizer moves and computes
    ends        what the cut takes to lie around the layers; None: by their times
    table       elements of what is looked up before the layers, whose gradient is as large
    tied        whether the head has the same weights, of which the last stage of a pipeline has a copy
    clips       whether the norm of gradients is taken
    """

    machine: Machine
    hidden: float
    half: bool
    states: float
    flops: float
    world_size: int
    step: StepCost = NO_STEP
    ends: Ends | None = None
    table: float = 0.0
    tied: bool = False
    clips: bool = False


class Rounds(NamedTuple):
    """How often in a step a rank's gradients are reduced over data-parallel ranks, and its weights gathered."""

    reduced: int
    gathered: int


def data_rounds(layout: Layout) -> Rounds:
    """Below stage 2 gradients are summed on their rank first, from it on every microbatch's are reduced. Updated
    weights are gathered once; those of stage 3 for every forward and backward, of a pipeline's chunks once where all
    of a rank's find room (up to three), else for each of the actions.
    """
    if layout.dp * layout.sp == 1:
        return Rounds(0, 0)
    reduced = layout.count if layout.zero >= 2 else 1
    if layout.zero < 3:
        return Rounds(reduced, 1 if layout.zero else 0)
    return Rounds(reduced, 2 * layout.count if layout.pp == 1 or layout.chunks > 3 else 1)


class Estimate(NamedTuple):
    """layout
    memory      bytes on the fullest rank
    seconds     of a step
    parts       of `seconds`: computing, waiting for the pipeline, and what of communication is not hidden, by axis
    mfu         share of the devices' peak that the model's products use
    simulated   False: by formulas only
    processor   seconds of a processor that a rank takes, where it computes; else 0
    """

    layout: Layout
    memory: float
    seconds: float
    parts: dict[str, float]
    mfu: float
    simulated: bool = False
    processor: float = 0.0


class Estimator:
    """Of one layout; `counts` are layers of every stage, where it is known how the model is cut."""

    def __init__(self, task: Task, rates: Rates, layout: Layout, counts: Sequence[int] | None = None) -> None:
        assert rates.samples == layout.samples / layout.sp
        self._task, self._rates, self._layout = task, rates, layout
        self._given = counts
        self._exactly = False  # whether the stages are those that the cut makes

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
        layer, layout = self._rates.layer, self._layout
        sent = [self._tensor(layer.sent, layer.calls), self._tensor(layer.sent_back, layer.calls_back) * _BEHIND]
        ring = self._sequence()
        forward = layer.forward + layer.start + sent[0] + ring
        backward = layer.backward + layer.start_back + sent[1] + ring + self._added(layer)
        host = self._task.machine.host
        backward += layout.whole * (forward + host.again[0])
        backward += layout.selective * (layer.cheap + layer.start / 2 + host.again[1])
        if STYLES[layout.style].splits and layout.pp > 1:
            backward += host.waiting
        return forward, backward, layer.forward

    @cached_property
    def _stalls(self) -> float:
        """Seconds of a layer's forward and backward that wait for what ZeRO-3 gathers and reduces meanwhile. Chunks of
        pipelines are gathered as a whole.
        """
        layout, parameters = self._layout, self._rates.layer.parameters
        if layout.zero < 3 or layout.pp > 1:
            return 0.0
        forward, backward, _ = self._actions
        gather, reduce = self._among_data(self._itemsize * parameters), self._among_data(4 * parameters)
        return max(gather - forward, 0.0) + max(gather + reduce - backward, 0.0)

    @property
    def _itemsize(self) -> int:
        """Bytes of a weight."""
        return 2 if self._task.half else 4

    def _among_data(self, size: float) -> float:
        """Seconds of gathering or reducing so many bytes over the ranks that share an optimizer."""
        ranks = self._layout.dp * self._layout.sp
        return self._task.machine.sent(size * (ranks - 1) / ranks, ranks, self._task.world_size)

    def _added(self, part: PartCost) -> float:
        """Seconds of a backward for adding gradients to sums, beside copying them as those of a first microbatch are
        (see `zero.bucket`). In pipelines autograd adds all of them, converted first, to what was set to zero.
        """
        layout, machine = self._layout, self._task.machine

        def moving(numbers: float, calls: float = 1.0) -> float:
            """So many bytes for a parameter's element, all of the part."""
            size = round(numbers * part.parameters / max(calls, 1.0))
            return machine.computing({Operator("other", 0, size): calls}) if size else 0.0

        zeros, converted = (4 / layout.count, 8 if self._task.half else 0) if layout.pp > 1 else (0.0, 0)
        sums = machine.summing(4 * part.parameters, part.tensors)
        if sums is not None:
            return max(sums - moving(8, part.tensors), 0.0) + moving(zeros + converted)
        read = 4 if layout.pp > 1 else 4 * (layout.count - 1) / layout.count  # the sum is read, too
        return moving(read + zeros + converted)

    def _tensor(self, sent: float, calls: float) -> float:
        layout, machine = self._layout, self._task.machine
        if layout.tp == 1:
            return 0.0
        sending = sent / (machine.inside * machine.sending)
        return sending + calls * max(machine.latency, machine.host.collective, machine.host.answered)

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
            rest.forward + rest.start + sent[0],
            rest.backward + rest.start_back + sent[1] + self._added(rest),
        )

    @cached_property
    def _counts(self) -> list[int]:
        """Layers of every stage, as the cut deals them; where only formulas are asked for, about so: the last one has
        fewer, for its head, and the first ones.
        """
        layers, stages, layout = self._rates.layers, self._stages, self._layout
        if self._given is not None:
            return list(self._given)
        if stages == 1:
            return [layers]
        if self._task.ends is not None and self._exactly:
            placement = self._schedule[0].placement
            return list(dealt(layers, self._task.ends, placement, layout.whole, layout.selective))
        last = min(max(round((layers + self._head) / stages - self._head), 0), layers - stages + 1)
        each, more = divmod(layers - last, stages - 1)
        return [each + (index >= stages - 1 - more) for index in range(stages - 1)] + [last]

    # Time.

    def estimate(self, simulated: bool) -> Estimate:
        layout, machine = self._layout, self._task.machine
        self._exactly = simulated
        forward, backward, late = self._actions
        computing = self._computing()
        length = self._simulated() if simulated and layout.pp > 1 else self._by_formula(forward, backward, late)
        parts = {"computing": computing, "pipeline": max(length - computing, 0.0)}
        parts |= self._data(backward)
        parameters = self._parameters()
        shared = parameters / (layout.dp if layout.zero else 1)
        step = self._task.step
        moved = (step.moved or 4 + 8 + 8 * self._task.states) + self._itemsize
        if self._task.clips:
            moved += 4
        parts["optimizer"] = machine.stepping(shared * moved, shared * step.flops)
        host = machine.step + self._replicated
        if host:
            parts["host"] = host
        processor = 0.0
        if machine.cores:  # which all ranks share
            processor = computing - self._waiting + parts["optimizer"] + host + self._sending
            parts["sharing cores"] = max(self._task.world_size * processor / machine.cores - sum(parts.values()), 0.0)
        seconds = sum(parts.values())
        samples = layout.samples * layout.count * layout.dp
        mfu = self._task.flops * samples / (seconds * self._task.world_size * machine.flops)
        memory = self._memory(simulated)
        return Estimate(layout, memory, seconds, parts, mfu, simulated, processor)

    def _computing(self) -> float:
        """Of a rank with its share of everything, all microbatches."""
        forward, backward, _ = self._actions
        whole = self._rates.layers * (forward + backward) + sum(self._rest)
        return self._layout.count * (whole / self._layout.pp + 2 * self._layout.chunks * self._action)

    @property
    def _action(self) -> float:
        """Seconds of the host for an action of a pipeline, beside what it computes."""
        return self._task.machine.host.action if self._layout.pp > 1 else 0.0

    @property
    def _replicated(self) -> float:
        """Seconds of the host in a step for what other ranks have, too."""
        layout, rates = self._layout, self._rates
        if layout.dp * layout.sp == 1:
            return 0.0
        host, place = self._task.machine.host, int(layout.zero == 3)
        tensors = (rates.layers * rates.layer.tensors + rates.rest.tensors) / layout.pp
        times = data_rounds(layout).reduced
        return host.replicas[place] + host.hooks[place] * tensors * times

    # On a processor, which what is sent keeps busy for a part of the time that it takes.

    @property
    def _waiting(self) -> float:
        """Of `computing`, the seconds of collectives between tensor- and sequence-parallel ranks."""
        layer, rest, layout = self._rates.layer, self._rates.rest, self._layout
        of_layer = self._tensor(layer.sent, layer.calls) + self._tensor(layer.sent_back, layer.calls_back) * _BEHIND
        of_rest = self._tensor(rest.sent, rest.calls) + self._tensor(rest.sent_back, rest.calls_back)
        return layout.count * (self._rates.layers * (of_layer + 2 * self._sequence()) + of_rest) / layout.pp

    @property
    def _sending(self) -> float:
        """Seconds of a rank's processor in a step for all that it sends."""
        layer, rest, layout, machine = self._rates.layer, self._rates.rest, self._layout, self._task.machine

        def tensor(sent: float, calls: float) -> float:
            if layout.tp == 1 or not calls:
                return 0.0
            small, own = (machine.busy(size, layout.tp) for size in (1, sent / calls))
            return calls * (max(own - small, 0.0) + max(machine.host.collective, small))

        found = self._rates.layers * (tensor(layer.sent, layer.calls) + tensor(layer.sent_back, layer.calls_back))
        found += tensor(rest.sent, rest.calls) + tensor(rest.sent_back, rest.calls_back)
        if layout.sp > 1:
            size = self._samples(self._task.hidden) / layout.tp
            found += self._rates.layers * 8 * machine.busy(size, layout.sp)  # four exchanges, there and back
        found *= layout.count / layout.pp
        if layout.pp > 1:
            found += self._messages * max(machine.message_busy(self._message_size) - machine.message_busy(1), 0.0)
        ranks = layout.dp * layout.sp
        if ranks > 1:
            rounds, share = data_rounds(layout), (ranks - 1) / ranks
            parameters = self._parameters()
            reduced = machine.busy(4 * parameters * share * (1 if layout.zero else 2), ranks)
            found += rounds.reduced * reduced + rounds.gathered * machine.busy(
                self._itemsize * parameters * share, ranks
            )
        return found

    def _by_formula(self, forward: float, backward: float, late: float) -> float:
        layout = self._layout
        dearest = layout.chunks * (self._most * (forward + backward) + 2 * self._action)
        last = self._counts[-1] * (forward + backward) + sum(self._rest) + 2 * self._action
        if layout.pp == 1:
            return layout.count * (self._rates.layers * (forward + backward) + sum(self._rest))
        dearest = max(dearest, last)
        if STYLES[layout.style].splits:
            idle = dearest - 2 * self._most * layout.chunks * late
        else:
            idle = dearest
        return layout.count * dearest + (layout.pp - 1) * (idle / layout.chunks + 2 * self._message)

    @property
    def _message_size(self) -> float:
        return self._samples(self._task.hidden) / (self._layout.tp if self._rates.along else 1)

    @cached_property
    def _message(self) -> float:
        layout = self._layout
        return self._task.machine.message(self._message_size, layout.pp * layout.tp * layout.sp)

    @property
    def _messages(self) -> float:
        """That a rank sends or receives in a step, the mean over a pipeline's."""
        layout, placement = self._layout, self._schedule[0].placement
        parted = sum(placement.rank_of(stage) != placement.rank_of(stage + 1) for stage in range(self._stages - 1))
        return 4 * parted * layout.count / layout.pp

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every stage's actions."""
        forward, backward, late = self._actions
        rest = self._rest
        counts = self._counts
        forwards = [count * forward + self._action for count in counts]
        grads = [count * (backward - late) + self._action for count in counts]
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
        """What of gradients and weights on their way is not hidden: see `data_rounds`."""
        layout = self._layout
        if layout.dp * layout.sp < 2:
            return {}
        rounds = data_rounds(layout)
        parameters = self._parameters()
        # behind the backward of the last layers of a microbatch; of ZeRO-3 without a pipeline see `_stalls`
        hidden = 0.9 * self._most * layout.chunks * backward
        reduced = self._among_data(4 * parameters) * (1 if layout.zero else 2)
        exposed = rounds.reduced * max(reduced - hidden, 0.0)
        if layout.zero == 3 and layout.pp == 1:
            exposed = layout.count * self._rates.layers * self._stalls
        gathered = self._among_data(self._itemsize * parameters)
        if layout.zero == 3:  # the first of a step is waited for; others come while chunks compute
            whole = self._rates.rest.parameters if layout.pp == 1 else parameters / layout.chunks
            gathered = self._among_data(self._itemsize * whole)
        return {"data": exposed + (gathered if rounds.gathered else 0.0)}

    # Memory.

    def _parameters(self) -> float:
        """Elements of the first rank, which mostly has most of them."""
        layer, rest, layout = self._rates.layer, self._rates.rest, self._layout
        if layout.pp == 1:
            return self._rates.layers * layer.parameters + rest.parameters
        return self._counts[0] * layout.chunks * layer.parameters + max(self._at_ends)

    @property
    def _at_ends(self) -> tuple[float, float]:
        """Elements beside the layers of the first stage of a pipeline and of the last one."""
        rest, table = self._rates.rest.parameters, self._table
        return (table, rest if self._task.tied else rest - table) if table else (rest / 2, rest / 2)

    @property
    def _table(self) -> float:
        """Of what is looked up, of a rank."""
        return min(self._task.table / self._layout.tp, self._rates.rest.parameters)

    def _static(self, parameters: float) -> float:
        layout, task = self._layout, self._task
        sharing = layout.dp * layout.sp if layout.zero else 1
        itemsize = 2 if task.half else 4
        weights = itemsize * parameters if layout.zero < 3 else 0.0
        gradients = 4 * parameters / (sharing if layout.zero >= 2 else 1)
        masters = 4 * parameters / sharing if task.half or layout.zero == 3 else 0.0
        states = 4 * task.states * parameters / sharing
        if layout.zero == 3 and layout.pp > 1:  # gathered: up to three chunks with all that they hold
            weights += itemsize * min(3 / layout.chunks, 1.0) * parameters
        return weights + gradients + masters + states

    def _reducing(self, beside: float, parameters: float) -> float:
        """For gradients on their way, of a rank with a unit of so many elements beside its layers (`zero.reducer`): at
        stage 2 two buckets, or one with all `parameters` where they are fewer; at stage 3 two of the size of the
        largest unit, or of the largest piece in which that goes.
        """
        layout = self._layout
        if layout.dp * layout.sp == 1 or layout.zero < 2:
            return 0.0
        if layout.zero == 2:
            return min(_BUCKET, 4 * parameters)
        size = 4 * max(beside, self._rates.layer.parameters)
        return 2 * size / max(ceil(size / _BUCKET), 1)

    def _unpiped(self, held: float) -> float:
        """Beyond what is there between steps, without a pipeline, where microbatches leave so much for their backward.

        At stage 3 weights of units that are gathered one by one come to it (`zero.unit_gatherer`): ahead as many as
        take the memory of the largest unit, at least one. The head of a tied model is the unit of the table, behind
        which the first layers come in a forward; its last layer, with which a backward begins, stays.
        """
        rest, layer = self._rates.rest, self._rates.layer.parameters
        layers, head = self._transient
        if self._layout.zero < 3:
            return max(held + head, self._at_table)
        table, behind = self._at_ends
        ahead = min(max(int(max(table, behind, layer) / max(layer, 1.0)), 1), self._rates.layers - 1)
        at_head = (table + (ahead + 1) * layer, table + layer) if self._task.tied else (behind, behind)
        return max(
            held + layers + self._itemsize * (ahead + 1) * layer,
            held + rest.forward_top + self._itemsize * at_head[0],
            held + rest.backward_top + self._itemsize * at_head[1],
            self._at_table + self._itemsize * table,
        )

    def _kept(self, layers: int) -> float:
        """Of the layers of a stage, of a microbatch; shares of them are rounded down, as the plugin has it."""
        layer, layout = self._rates.layer, self._layout
        whole = int(layout.whole * layers)
        selective = min(int(layout.selective * layers), layers - whole)
        # what products gave, of which the last result goes into the next layer's inputs (`ops.keeping`)
        in_part = min(self._kept_whole + max(layer.made - self._samples(self._task.hidden), 0.0), layer.kept)
        return whole * self._kept_whole + selective * in_part + (layers - whole - selective) * layer.kept

    @property
    def _kept_whole(self) -> float:
        """Of a layer that is recomputed: its inputs, and what its forward's collectives gave, which run once. The last
        result goes into the next layer's inputs.
        """
        hidden, tp = self._samples(self._task.hidden), self._layout.tp
        if tp == 1:
            return hidden
        return 2 * hidden * (1 + 1 / tp if self._rates.along else 1)

    @cached_property
    def _transient(self) -> tuple[float, float]:
        """Of the layers, and where the head is too."""
        layer, rest, layout = self._rates.layer, self._rates.rest, self._layout
        again = layer.kept if layout.whole or layout.selective else 0.0
        of_layers = max(layer.forward_top, layer.backward_top + again)
        # a head's weight gradient that waits is summed where gradients are kept, not in room of its own
        summed = 4 * rest.parameters / 2 if self._sums_later else 0.0
        of_head = max(rest.forward_top, rest.backward_top - summed)
        return of_layers, max(of_layers, of_head)

    @property
    def _sums_later(self) -> bool:
        """Whether weight gradients wait, and are added to a buffer that is there for all of them."""
        return STYLES[self._layout.style].splits and self._layout.pp > 1 and self._layout.zero < 2

    @property
    def _at_table(self) -> float:
        """Of the end of a backward where the table is, when all of the microbatch has gone: its gradient in the dtype
        of the weights, and as it is added up.
        """
        added = 4 if self._task.half and not self._sums_later else 0
        if self._layout.pp == 1 and self._rates.rest.end_top:
            return self._rates.rest.end_top
        return (self._itemsize + added) * self._table

    def _memory(self, simulated: bool) -> float:
        layout = self._layout
        if layout.pp == 1:
            held = self._kept(self._rates.layers) + self._rates.rest.kept
            return (
                self._static(self._parameters())
                + self._unpiped(held)
                + self._reducing(max(self._at_ends), self._parameters())
            )
        layers, head = self._transient
        besides = _MESSAGES * self._message_size
        if not simulated:
            ends = self._static(self._parameters())
            under_way = min(layout.count, layout.pp)
            held = under_way * layout.chunks * self._kept(self._counts[0])
            if layout.style == "interleaved":
                held *= 1 + (layout.pp - 1) / self._stages
            others = held - self._kept(self._counts[0])
            besides += self._reducing(max(self._at_ends), self._parameters())
            return ends + max(held + layers, others + self._at_table) + besides
        schedule, _ = self._schedule
        kept = [self._kept(count) for count in self._counts]
        kept[-1] += self._rates.rest.kept
        waiting = [count * self._rates.layer.kept * 0.8 for count in self._counts]
        deferred = waiting if STYLES[layout.style].splits else None
        curves = memory_curves(self._run.run, kept, deferred)
        first, last = (schedule.placement.rank_of(stage) for stage in (0, self._stages - 1))
        found: list[float] = []
        for rank, curve in enumerate(curves):
            # what waits is bounded by what 1F1B's first rank would hold
            bound = max(float(curve.kept.max()), min(layout.count, layout.pp) * layout.chunks * self._kept(self._most))
            own = sum(self._counts[stage] for stage in schedule.placement.stages_of(rank))
            parameters = own * self._rates.layer.parameters
            beside = 0.0
            if first == last == rank:
                parameters += self._rates.rest.parameters
                beside = max(self._at_ends)
            elif rank in (first, last):
                beside = self._at_ends[rank == last]
                parameters += beside
            stages = self._run.run.actions.stages[self._run.run.of(rank)]
            behind = np.minimum(curve.kept + curve.deferred, bound)
            held = np.maximum(behind, np.concatenate([[0.0], behind[:-1]]))  # a backward begins with what it frees
            highest = float((held + np.where(stages == self._stages - 1, head, layers)).max())
            if rank == first:
                highest = max(highest, float(held.max()) - kept[0] + self._at_table)
            found.append(self._static(parameters) + highest + self._reducing(beside, parameters) + besides)
        return max(found)


@lru_cache(maxsize=256)
def _schedule(style: str, ranks: int, count: int, chunks: int) -> Schedule:
    return get_schedule(style, ranks, count, chunks, pairs=False)
