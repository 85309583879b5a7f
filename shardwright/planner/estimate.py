"""Time of a step of one layout, from what layers cost (`rates`): the schedule's simulator, with communication that the
runtime hides taken out. What a step holds is in `footprint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ..pipeline.planning.simulate import Costs, Simulation, simulate
from ..pipeline.schedules import STYLES, Schedule
from ..pipeline.schedules import get as get_schedule
from .candidate import Layout, Task, data_rounds
from .footprint import Footprint
from .operators import Operator
from .rates import PartCost, Rates
from .stages import dealt

_ROUNDS = 4  # of so many microbatches per rank is simulated; all others take what those between take
_BEHIND = 0.5  # share of a backward's collectives that weight gradients hide


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
    """Of one layout; `cut` are the layers of every stage, where it is known how the model is cut."""

    def __init__(self, task: Task, rates: Rates, layout: Layout, cut: Sequence[range] | None = None) -> None:
        assert rates.samples == layout.samples / layout.sp
        self._task, self._rates, self._layout = task, rates, layout
        self._given = cut
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

    @cached_property
    def _footprint(self) -> Footprint:
        return Footprint(self._task, self._rates, self._layout, self._cut)

    @cached_property
    def _by_kind(self) -> list[tuple[float, float, float]]:
        """Seconds of a layer's forward, backward, and of what of its backward can wait, of each kind; where nothing is
        recomputed.
        """
        return [self._actions_of(kind) for kind in self._rates.kinds]

    def _actions_of(self, layer: PartCost) -> tuple[float, float, float]:
        layout = self._layout
        sent = [self._tensor(layer.sent, layer.calls), self._tensor(layer.sent_back, layer.calls_back) * _BEHIND]
        ring = self._sequence()
        forward = layer.forward + layer.start + sent[0] + ring
        backward = layer.backward + layer.start_back + sent[1] + ring + self._added(layer)
        host = self._task.machine.host
        if STYLES[layout.style].splits and layout.pp > 1:
            backward += host.waiting
        return forward, backward, layer.forward

    @cached_property
    def _again_by_kind(self) -> tuple[list[float], list[float]]:
        """Seconds of a layer's backward for what is recomputed, as a whole and in part, of each kind."""
        whole, in_part = self._task.machine.host.again
        kinds = self._rates.kinds
        return (
            [forward + whole for forward, _, _ in self._by_kind],
            [kind.cheap + kind.start / 2 + in_part for kind in kinds],
        )

    def _recomputed(self, layers: range) -> list[tuple[range, list[float]]]:
        """Those of a stage's layers that are, the first ones, and what it adds to the backward of each kind."""
        whole, selective = self._footprint.recomputed(layers)
        parts = layers[:whole], layers[whole : whole + selective]
        return [(part, own) for part, own in zip(parts, self._again_by_kind, strict=True) if part]

    def _again(self, layers: range) -> float:
        """Seconds for what is recomputed of a stage with these layers."""
        return sum(
            number * seconds
            for part, own in self._recomputed(layers)
            for number, seconds in zip(self._rates.numbers(part), own, strict=True)
        )

    def _actions(self, layers: range) -> tuple[float, float, float]:
        """The same of all these layers together."""
        numbers = self._rates.numbers(layers)
        forward, backward, late = (
            sum(number * own[index] for number, own in zip(numbers, self._by_kind, strict=True)) for index in range(3)
        )
        return forward, backward + self._again(layers), late

    @property
    def _every(self) -> range:
        return range(self._rates.layers)

    @cached_property
    def _of_stages(self) -> list[tuple[float, float, float]]:
        return [self._actions(layers) for layers in self._cut]

    def _stalls(self) -> float:
        """Seconds of all layers' forwards and backwards that wait for what ZeRO-3 gathers and reduces meanwhile. Chunks
        of pipelines are gathered as a whole.
        """
        found, every = 0.0, self._every
        again = self._recomputed(every)
        plain = every[sum(len(part) for part, _ in again) :]
        for part, more in (*again, (plain, [0.0] * len(self._rates.kinds))):
            every_kind = zip(self._rates.numbers(part), self._rates.kinds, self._by_kind, more, strict=True)
            for number, kind, (forward, backward, _), added in every_kind:
                gather = self._among_data(self._footprint.itemsize * kind.parameters)
                reduce = self._among_data(4 * kind.parameters)
                found += number * (max(gather - forward, 0.0) + max(gather + reduce - backward - added, 0.0))
        return found

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
        size = 4 * self._footprint.hidden / layout.tp
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
    def _cut(self) -> list[range]:
        """Layers of every stage, as the cut deals them; where only formulas are asked for, about so: the last one has
        fewer, for its head, and the first ones.
        """
        if self._given is not None:
            return list(self._given)
        layers, stages, layout = self._rates.layers, self._stages, self._layout
        if stages == 1:
            return [self._every]
        if self._task.ends is not None and self._exactly:
            placement = self._schedule[0].placement
            counts = list(dealt(layers, self._task.ends, placement, layout.whole, layout.selective))
        else:
            last = min(max(round((layers + self._head) / stages - self._head), 0), layers - stages + 1)
            each, more = divmod(layers - last, stages - 1)
            counts = [each + (index >= stages - 1 - more) for index in range(stages - 1)] + [last]
        bounds = accumulate(counts, initial=0)
        return [range(low, high) for low, high in pairwise(bounds)]

    # Time.

    def estimate(self, simulated: bool) -> Estimate:
        layout, machine = self._layout, self._task.machine
        self._exactly = simulated
        computing = self._computing()
        length = self._simulated() if simulated and layout.pp > 1 else self._by_formula()
        parts = {"computing": computing, "pipeline": max(length - computing, 0.0)}
        parts |= self._data()
        parameters = self._footprint.parameters()
        shared = parameters / (layout.dp if layout.zero else 1)
        step = self._task.step
        moved = (step.moved or 4 + 8 + 8 * self._task.states) + self._footprint.itemsize
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
        if machine.waits != 1:
            parts["waiting for others"] = (machine.waits - 1) * sum(parts.values())
        seconds = sum(parts.values())
        samples = layout.samples * layout.count * layout.dp
        mfu = self._task.flops * samples / (seconds * self._task.world_size * machine.flops)
        memory = self._footprint.memory(self._run.run if simulated and layout.pp > 1 else None)
        return Estimate(layout, memory, seconds, parts, mfu, simulated, processor)

    def _computing(self) -> float:
        """Of a rank with its share of everything, all microbatches."""
        whole = sum(forward + backward for forward, backward, _ in self._of_stages) + sum(self._rest)
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
            size = self._footprint.hidden / layout.tp
            found += self._rates.layers * 8 * machine.busy(size, layout.sp)  # four exchanges, there and back
        found *= layout.count / layout.pp
        if layout.pp > 1:
            found += self._messages * max(machine.message_busy(self._footprint.message) - machine.message_busy(1), 0.0)
        ranks = layout.dp * layout.sp
        if ranks > 1:
            rounds, share = data_rounds(layout), (ranks - 1) / ranks
            parameters = self._footprint.parameters()
            reduced = machine.busy(4 * parameters * share * (1 if layout.zero else 2), ranks)
            found += rounds.reduced * reduced + rounds.gathered * machine.busy(
                self._footprint.itemsize * parameters * share, ranks
            )
        return found

    def _by_formula(self) -> float:
        layout = self._layout
        if layout.pp == 1:
            return self._computing()
        dearest = layout.chunks * (
            max(forward + backward for forward, backward, _ in self._of_stages) + 2 * self._action
        )
        forward, backward, _ = self._of_stages[-1]
        dearest = max(dearest, forward + backward + sum(self._rest) + 2 * self._action)
        idle = dearest
        if STYLES[layout.style].splits:
            idle -= 2 * layout.chunks * max(late for _, _, late in self._of_stages)
        return layout.count * dearest + (layout.pp - 1) * (idle / layout.chunks + 2 * self._message)

    @cached_property
    def _message(self) -> float:
        layout = self._layout
        return self._task.machine.message(self._footprint.message, layout.pp * layout.tp * layout.sp)

    @property
    def _messages(self) -> float:
        """That a rank sends or receives in a step, the mean over a pipeline's."""
        layout, placement = self._layout, self._schedule[0].placement
        parted = sum(placement.rank_of(stage) != placement.rank_of(stage + 1) for stage in range(self._stages - 1))
        return 4 * parted * layout.count / layout.pp

    @cached_property
    def costs(self) -> Costs:
        """Seconds of every stage's actions."""
        rest = self._rest
        forwards = [forward + self._action for forward, _, _ in self._of_stages]
        grads = [backward - late + self._action for _, backward, late in self._of_stages]
        weights = [late for _, _, late in self._of_stages]
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

    def _data(self) -> dict[str, float]:
        """What of gradients and weights on their way is not hidden: see `data_rounds`."""
        layout = self._layout
        if layout.dp * layout.sp < 2:
            return {}
        rounds = data_rounds(layout)
        parameters = self._footprint.parameters()
        # behind the backward of the last layers of a microbatch; of ZeRO-3 without a pipeline see `_stalls`
        hidden = 0.9 * layout.chunks * max(backward for _, backward, _ in self._of_stages)
        reduced = self._among_data(4 * parameters) * (1 if layout.zero else 2)
        exposed = rounds.reduced * max(reduced - hidden, 0.0)
        if layout.zero == 3 and layout.pp == 1:
            exposed = layout.count * self._stalls()
        gathered = self._among_data(self._footprint.itemsize * parameters)
        if layout.zero == 3:  # the first of a step is waited for; others come while chunks compute
            whole = self._rates.rest.parameters if layout.pp == 1 else parameters / layout.chunks
            gathered = self._among_data(self._footprint.itemsize * whole)
        return {"data": exposed + (gathered if rounds.gathered else 0.0)}


@lru_cache(maxsize=256)
def _schedule(style: str, ranks: int, count: int, chunks: int) -> Schedule:
    return get_schedule(style, ranks, count, chunks, pairs=False)
