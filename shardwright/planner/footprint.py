"""Memory of the fullest rank of one layout, from what layers keep (`rates`): static bytes, what microbatches under way
leave, what actions need for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..pipeline.planning.actions import KINDS, Kind
from ..pipeline.planning.memory import MemoryCurve, memory_curves
from ..pipeline.planning.simulate import Run
from ..pipeline.schedules import STYLES
from ..zero.layout import BUCKET_SIZE_IN_M, bucket_numel
from .candidate import Layout, Task
from .rates import Rates

_MESSAGES = 4  # under way at a time
_WAITS = 1.6  # times what products give wait with their weight gradients: that, and inputs, which some of them share
_I, _W = KINDS.index(Kind.I), KINDS.index(Kind.W)


class _Stage(NamedTuple):
    """Elements before its layers, these, elements behind them, and how often it looks up the table."""

    before: float
    layers: range
    behind: float
    lookups: int = 0


class Footprint:
    """Of a layout whose stages, all chunks of all ranks, have the layers of `cut`."""

    def __init__(self, task: Task, rates: Rates, layout: Layout, cut: Sequence[range]) -> None:
        self._task, self._rates, self._layout, self._cut = task, rates, layout, cut

    @property
    def hidden(self) -> float:
        """Bytes of a microbatch between layers, whose sequences sequence-parallel ranks share."""
        return self._task.hidden * self._layout.samples / self._layout.sp

    @property
    def itemsize(self) -> int:
        """Bytes of a weight."""
        return 2 if self._task.half else 4

    @property
    def message(self) -> float:
        """Bytes of what goes from a stage to the next."""
        return self.hidden / (self._layout.tp if self._rates.along else 1)

    def parameters(self) -> float:
        """Elements of the first rank, which mostly has most of them."""
        layout = self._layout
        if layout.pp == 1:
            return self._of_layers(range(self._rates.layers)) + self._rates.rest.parameters
        return self._of_layers(self._cut[0]) * layout.chunks + max(self._at_ends)

    def _of_layers(self, layers: range) -> float:
        """Elements of these layers."""
        return self._rates.total("parameters", layers)

    def _largest(self, layers: Sequence[range]) -> float:
        """Elements of the largest of these layers."""
        return max(kind.parameters for kind in self._rates.present(layers))

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

    def _reducing(self, stages: Sequence[_Stage]) -> float:
        """For gradients on their way (`zero.reducer`), of a rank with these stages: two buckets, or pieces of them; on
        CPUs as much again for what arrives (`zero.collectives`), which is all that they take at stage 1.
        """
        layout = self._layout
        lent = (layout.zero >= 2) + (self._on_cpu and layout.zero >= 1)
        if layout.dp * layout.sp == 1 or not lent:
            return 0.0
        least = self._bucket
        if layout.zero == 3:
            largest_layer = self._largest([stage.layers for stage in stages])
            buckets = [max(largest_layer, *(size for stage in stages for size in (stage.before, stage.behind)))] * 2
        else:
            buckets = [size for stage in stages for part in self._buckets(stage) for size in part]
        pieces = [ceil(size / (2 * least)) for size in buckets]
        largest = max(size / max(number, 1) for size, number in zip(buckets, pieces, strict=True))
        return 4 * lent * min(2, sum(pieces)) * largest

    @property
    def _bucket(self) -> int:
        """Elements of a bucket, at least."""
        return bucket_numel(BUCKET_SIZE_IN_M, "cpu" if self._on_cpu else "cuda", torch.float32)

    @property
    def _on_cpu(self) -> bool:
        return self._task.machine.cores > 0

    def _buckets(self, stage: _Stage) -> Iterator[list[float]]:
        """Elements of those that a stage fills, from its end on. Gradients that do not wait in a schedule where others
        do, and those that stages add up, have their own.
        """
        rates = self._rates
        of_kind = [
            [share * kind.parameters for share in reversed(shares or (1.0,))]
            for kind, shares in zip(rates.kinds, rates.shares, strict=True)
        ]
        again = sum(self.recomputed(stage.layers)) if self._splits else 0

        def tensors(layers: range) -> list[float]:
            return [size for layer in reversed(layers) for size in of_kind[rates.order[layer]]]

        parts = [[stage.behind, *tensors(stage.layers[again:])], tensors(stage.layers[:again])]
        if self._task.tied and self._layout.pp > 1:
            parts.append([stage.before])
        else:
            parts[0].append(stage.before)
        for part in parts:
            filled = [0.0]
            for size in part:
                filled += [0.0] if filled[-1] >= self._bucket else []
                filled[-1] += size
            yield filled

    def _beside_waiting(self, stage: _Stage, kept: float) -> float:
        """What is most in the backward of a pipeline's layers at ZeRO-2, beyond all that they keep: gradients that wait
        for their bucket, less what has gone by then.
        """
        if self._layout.zero != 2 or self._layout.dp * self._layout.sp == 1:
            return 0.0
        most, waits, number = 0.0, stage.behind, len(stage.layers)
        for gone, layer in enumerate(reversed(stage.layers)):
            waits = 0.0 if waits >= self._bucket else waits
            most = max(most, self._waiting_size * waits - kept * gone / number)
            kind = self._rates.order[layer]
            for share in reversed(self._rates.shares[kind] or (1.0,)):
                waits = 0.0 if waits >= self._bucket else waits
                waits += share * self._rates.kinds[kind].parameters
        return most

    def _unfilled(self, stage: _Stage) -> float:
        """Bytes of gradients that wait for their bucket when a backward comes to the table."""
        if self._layout.zero != 2 or self._layout.dp * self._layout.sp == 1:
            return 0.0
        last = next(self._buckets(stage))[-1]
        return self._waiting_size * max(last - stage.before, 0.0)

    @property
    def _waiting_size(self) -> int:
        """Bytes of an element of a gradient that waits for its bucket: in pipelines as microbatches add it up."""
        return self.itemsize if self._layout.pp == 1 else 4

    def _unpiped(self, held: float, unfilled: float) -> float:
        """Beyond what is there between steps, without a pipeline, where microbatches leave so much for their backward.

        At stage 3 weights of units that are gathered one by one come to it (`zero.unit_gatherer`): ahead as many as
        take the memory of the largest unit, at least one. The head of a tied model is the unit of the table, beside
        which the last layer stays, with which a backward begins. Layers come ahead of a head's backward when it has
        begun.
        """
        rest, every = self._rates.rest, range(self._rates.layers)
        layer = self._largest([every])
        layers, head = self._transient([every])
        if self._layout.zero < 3:
            return max(held + head, self._at_table + unfilled)
        table, behind = self._at_ends
        ahead = min(max(int(max(table, behind, layer) / max(layer, 1.0)), 1), len(every) - 1)
        coming = ahead if rest.backward_top > rest.early_top else 0  # when the head's weight gradient is there
        at_head = (table + layer, table + layer) if self._task.tied else (behind, behind + coming * layer)
        return max(
            held + layers + self.itemsize * (ahead + 1) * layer,
            held + rest.forward_top + self.itemsize * at_head[0],
            held + rest.backward_top + self.itemsize * at_head[1],
            self._at_table + (self.itemsize * table if self._task.rereads else 0.0),
        )

    def _kept(self, layers: range) -> float:
        """Of the layers of a stage, of a microbatch."""
        whole, selective = self.recomputed(layers)
        second, third = layers[whole : whole + selective], layers[whole + selective :]
        numbers = self._rates.numbers(second)
        in_part = sum(number * each for number, each in zip(numbers, self._kept_in_part, strict=True))
        return whole * self._kept_whole + in_part + self._rates.total("kept", third)

    @cached_property
    def _kept_in_part(self) -> list[float]:
        """By kind, of a layer that is recomputed without its products: what these gave, of which the last result goes
        into the next layer's inputs (`ops.keeping`).
        """
        return [min(self._kept_whole + max(kind.made - self.hidden, 0.0), kind.kept) for kind in self._rates.kinds]

    def recomputed(self, layers: range) -> tuple[int, int]:
        """Layers of a stage that are, as a whole and in part; shares are rounded down, as the plugin has it."""
        whole = int(self._layout.whole * len(layers))
        return whole, min(int(self._layout.selective * len(layers)), len(layers) - whole)

    @property
    def _kept_whole(self) -> float:
        """Of a layer that is recomputed: its inputs, and what its forward's collectives gave, which run once. The last
        result goes into the next layer's inputs.
        """
        hidden, tp = self.hidden, self._layout.tp
        if tp == 1:
            return hidden
        return 2 * hidden * (1 + 1 / tp if self._rates.along else 1)

    def _transient(self, layers: Sequence[range]) -> tuple[float, float]:
        """Of these layers, and where the head is too."""
        rest, layout = self._rates.rest, self._layout
        recomputes = any(any(self.recomputed(each)) for each in layers)
        of_layers = 0.0
        for kind in self._rates.present(layers):
            largest = max(self._rates.shares[self._rates.kinds.index(kind)] or (0.0,)) * kind.parameters
            top = kind.backward_top + (self._converted * largest if layout.pp > 1 else 0.0)
            of_layers = max(of_layers, kind.forward_top, top + (kind.kept if recomputes else 0.0))
        # a weight gradient that waits is computed when the others' memory has gone
        waits = self._splits and layout.zero < 3
        of_head = max(rest.forward_top, rest.early_top if waits else rest.backward_top)
        return of_layers, max(of_layers, of_head)

    @property
    def _splits(self) -> bool:
        """Whether weight gradients wait."""
        return STYLES[self._layout.style].splits and self._layout.pp > 1

    @property
    def _at_table(self) -> float:
        """Of the end of a backward where the table is, when all of the microbatch has gone."""
        if self._layout.pp == 1 and self._rates.rest.end_top:
            return self._rates.rest.end_top
        return self._table_gradient(1)

    def _table_gradient(self, lookups: int) -> float:
        """In the dtype of the weights, and as it is added up: to those of the other lookups, and to the sum."""
        added = self._converted + (4 if lookups > 1 else 0)
        return (self.itemsize + added) * self._table

    @property
    def _converted(self) -> int:
        """Bytes of an element of a gradient in fp32, beside that in half precision: what microbatches add up is."""
        return 4 if self._task.half and not (self._splits and self._layout.zero < 2) else 0

    def memory(self, run: Run | None) -> float:
        """Of the fullest rank; where nobody has simulated the schedule of a pipeline, about so."""
        layout = self._layout
        if layout.pp == 1:
            every = range(self._rates.layers)
            held = self._kept(every) + self._rates.rest.kept
            before, behind = self._at_ends
            stage = _Stage(before, every, 0.0 if self._task.tied else behind)
            beyond = self._unpiped(held, self._unfilled(stage))
            return self._static(self.parameters()) + beyond + self._reducing([stage])
        if run is None:
            return self._about()
        curves = memory_curves(run, self._kept_by_stage, self._deferred if self._splits else None)
        return max(self._of_rank(rank, run, curve) for rank, curve in enumerate(curves))

    @cached_property
    def _kept_by_stage(self) -> list[float]:
        kept = [self._kept(layers) for layers in self._cut]
        kept[-1] += self._rates.rest.kept
        return kept

    @property
    def _deferred(self) -> list[float]:
        """Of a microbatch, by stage, what weight gradients that wait need: inputs of products and gradients of what
        they gave, those of logits too.
        """
        layout = self._layout
        # from stage 2 on those of layers that are recomputed do not wait, nor at stage 3 those of the head
        prompt = [sum(self.recomputed(layers)) if layout.zero >= 2 else 0 for layers in self._cut]
        deferred = [
            _WAITS * self._rates.total("made", layers[again:]) for layers, again in zip(self._cut, prompt, strict=True)
        ]
        deferred[-1] += self._rates.rest.made if layout.zero < 3 else 0.0
        return deferred

    def _about(self) -> float:
        """Of the first rank, which holds most microbatches."""
        layout, first = self._layout, self._cut[0]
        layers, _ = self._transient([first])
        under_way = min(layout.count, layout.pp)
        held = under_way * layout.chunks * self._kept(first)
        if layout.style == "interleaved":
            held *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
        others = [_Stage(0.0, first, 0.0)] * (layout.chunks - 1)
        stages = [_Stage(max(self._at_ends), first, 0.0), *others]
        held += max(layers, self._at_table - self._kept(first))
        return self._static(self.parameters()) + held + self._reducing(stages) + _MESSAGES * self.message

    def _stage(self, index: int) -> _Stage:
        """Where weights are looked up several times, each stage that does has them."""
        layers, last = self._cut[index], index == len(self._cut) - 1
        table, behind = self._at_ends
        again = [size / self._layout.tp for layer, size in self._task.again if layer in layers]
        before = table if index == 0 else 0.0
        behind = behind if last else 0.0
        lookups = (index == 0) + len(again)
        if again and index:
            if last and self._task.tied:  # the head's
                lookups += 1
            else:
                before = min(max(again), self._rates.rest.parameters)
        return _Stage(before, layers, behind, lookups)

    def _of_rank(self, rank: int, run: Run, curve: MemoryCurve) -> float:
        stages = run.placement.stages_of(rank)
        first, last = (run.placement.rank_of(stage) == rank for stage in (0, len(self._cut) - 1))
        own = [self._stage(stage) for stage in stages]
        parameters = sum(stage.before + self._of_layers(stage.layers) + stage.behind for stage in own)
        copies = sum(stage.before > 0 for stage in own) if self._task.again else int(first)
        copies += last and self._task.tied
        parameters -= max(copies - 1, 0) * self._table  # which it has once
        of_layers, of_head = self._transient([stage.layers for stage in own])
        if first and last and self._task.tied and self._layout.zero >= 2:  # the head's sum waits for that of the table
            of_head = max(of_head, self._rates.rest.early_top + 4 * self._table)
        here = run.of(rank)
        # what waits is bounded by what 1F1B's first rank would hold of stages like these
        room = min(self._layout.count, self._layout.pp) * sum(self._kept_by_stage[stage] for stage in stages)
        behind = curve.kept + _waiting(curve, run.actions.kinds[here], room)
        held = np.maximum(behind, np.concatenate([[0.0], behind[:-1]]))  # a backward begins with what it frees
        at_head = run.actions.stages[here] == len(self._cut) - 1
        highest = float((held + np.where(at_head, of_head, of_layers)).max())
        for index, stage in zip(stages, own, strict=True):
            most = float(held[run.actions.stages[here] == index].max())
            highest = max(highest, most + of_layers + self._beside_waiting(stage, self._kept_by_stage[index]))
            if stage.lookups:
                at_end = self._table_gradient(stage.lookups) + self._unfilled(stage)
                highest = max(highest, most - self._kept_by_stage[index] + at_end)
        return self._static(parameters) + highest + self._reducing(own) + _MESSAGES * self.message


def _waiting(curve: MemoryCurve, kinds: NDArray[Any], room: float) -> NDArray[Any]:
    """What waits for its weight gradients behind every action: as much as there is room for beside what is kept when an
    I adds to it, until a W leaves less.
    """
    found, waits = np.zeros_like(curve.kept), 0.0
    for place in np.flatnonzero((kinds == _I) | (kinds == _W)):
        free = max(room - curve.kept[place], 0.0) if kinds[place] == _I else waits
        waits = min(curve.deferred[place], free)
        found[place:] = waits
    return found
