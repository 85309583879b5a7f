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
    """Elements before its layers, how many layers it has, and elements behind them."""

    before: float
    layers: int
    behind: float


class Footprint:
    """Of a layout whose stages have so many layers, `counts`, of all chunks of all ranks."""

    def __init__(self, task: Task, rates: Rates, layout: Layout, counts: Sequence[int]) -> None:
        self._task, self._rates, self._layout, self._counts = task, rates, layout, counts

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

    def _reducing(self, stages: Sequence[_Stage]) -> float:
        """For gradients on their way (`zero.reducer`), of a rank with these stages: two buckets, or pieces of them."""
        layout, layer = self._layout, self._rates.layer
        if layout.dp * layout.sp == 1 or layout.zero < 2:
            return 0.0
        least = self._bucket
        if layout.zero == 3:
            units = [size for stage in stages for size in (stage.before, stage.behind, layer.parameters)]
            buckets = [max(units)] * 2
        else:
            buckets = [size for stage in stages for part in self._buckets(stage) for size in part]
        pieces = [ceil(size / (2 * least)) for size in buckets]
        largest = max(size / max(number, 1) for size, number in zip(buckets, pieces, strict=True))
        return 4 * min(2, sum(pieces)) * largest

    @property
    def _bucket(self) -> int:
        """Elements of a bucket, at least."""
        return bucket_numel(BUCKET_SIZE_IN_M, "cpu" if self._task.machine.cores else "cuda", torch.float32)

    def _buckets(self, stage: _Stage) -> Iterator[list[float]]:
        """Elements of those that a stage fills, from its end on. Gradients that do not wait in a schedule where others
        do, and those that stages add up, have their own.
        """
        layer = self._rates.layer
        tensors = [share * layer.parameters for share in reversed(self._rates.shares or (1.0,))]
        again = sum(self._recomputed(stage.layers)) if self._splits else 0
        parts = [[stage.behind, *tensors * (stage.layers - again)], tensors * again]
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

    def _unfilled(self, stage: _Stage) -> float:
        """Bytes of gradients that wait for their bucket when a backward comes to the table."""
        if self._layout.zero != 2 or self._layout.dp * self._layout.sp == 1:
            return 0.0
        last = next(self._buckets(stage))[-1]
        return self.itemsize * max(last - stage.before, 0.0)

    def _unpiped(self, held: float, unfilled: float) -> float:
        """Beyond what is there between steps, without a pipeline, where microbatches leave so much for their backward.

        At stage 3 weights of units that are gathered one by one come to it (`zero.unit_gatherer`): ahead as many as
        take the memory of the largest unit, at least one. The head of a tied model is the unit of the table, behind
        which the first layers come in a forward; its last layer, with which a backward begins, stays. Layers come
        ahead of a head's backward when it has begun.
        """
        rest, layer = self._rates.rest, self._rates.layer.parameters
        layers, head = self._transient
        if self._layout.zero < 3:
            return max(held + head, self._at_table + unfilled)
        table, behind = self._at_ends
        ahead = min(max(int(max(table, behind, layer) / max(layer, 1.0)), 1), self._rates.layers - 1)
        coming = ahead if rest.backward_top > rest.early_top else 0  # when the head's weight gradient is there
        at_head = (table + (ahead + 1) * layer, table + layer) if self._task.tied else (behind, behind + coming * layer)
        return max(
            held + layers + self.itemsize * (ahead + 1) * layer,
            held + rest.forward_top + self.itemsize * at_head[0],
            held + rest.backward_top + self.itemsize * at_head[1],
            self._at_table + self.itemsize * table,
        )

    def _kept(self, layers: int) -> float:
        """Of the layers of a stage, of a microbatch."""
        layer = self._rates.layer
        whole, selective = self._recomputed(layers)
        # what products gave, of which the last result goes into the next layer's inputs (`ops.keeping`)
        in_part = min(self._kept_whole + max(layer.made - self.hidden, 0.0), layer.kept)
        return whole * self._kept_whole + selective * in_part + (layers - whole - selective) * layer.kept

    def _recomputed(self, layers: int) -> tuple[int, int]:
        """Layers of a stage that are, as a whole and in part; shares are rounded down, as the plugin has it."""
        whole = int(self._layout.whole * layers)
        return whole, min(int(self._layout.selective * layers), layers - whole)

    @property
    def _kept_whole(self) -> float:
        """Of a layer that is recomputed: its inputs, and what its forward's collectives gave, which run once. The last
        result goes into the next layer's inputs.
        """
        hidden, tp = self.hidden, self._layout.tp
        if tp == 1:
            return hidden
        return 2 * hidden * (1 + 1 / tp if self._rates.along else 1)

    @cached_property
    def _transient(self) -> tuple[float, float]:
        """Of the layers, and where the head is too."""
        layer, rest, layout = self._rates.layer, self._rates.rest, self._layout
        again = layer.kept if layout.whole or layout.selective else 0.0
        of_layers = max(layer.forward_top, layer.backward_top + again)
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
        """Of the end of a backward where the table is, when all of the microbatch has gone: its gradient in the dtype
        of the weights, and as it is added up.
        """
        added = 4 if self._task.half and not (self._splits and self._layout.zero < 2) else 0
        if self._layout.pp == 1 and self._rates.rest.end_top:
            return self._rates.rest.end_top
        return (self.itemsize + added) * self._table

    def memory(self, run: Run | None) -> float:
        """Of the fullest rank; where nobody has simulated the schedule of a pipeline, about so."""
        layout = self._layout
        if layout.pp == 1:
            held = self._kept(self._rates.layers) + self._rates.rest.kept
            before, behind = self._at_ends
            stage = _Stage(before, self._rates.layers, 0.0 if self._task.tied else behind)
            beyond = self._unpiped(held, self._unfilled(stage))
            return self._static(self.parameters()) + beyond + self._reducing([stage])
        if run is None:
            return self._about()
        curves = memory_curves(run, self._kept_by_stage, self._deferred if self._splits else None)
        return max(self._of_rank(rank, run, curve) for rank, curve in enumerate(curves))

    @cached_property
    def _kept_by_stage(self) -> list[float]:
        kept = [self._kept(count) for count in self._counts]
        kept[-1] += self._rates.rest.kept
        return kept

    @property
    def _deferred(self) -> list[float]:
        """Of a microbatch, by stage, what weight gradients that wait need: inputs of products and gradients of what
        they gave, those of logits too.
        """
        layer, rest, layout = self._rates.layer, self._rates.rest, self._layout
        # from stage 2 on those of layers that are recomputed do not wait, nor at stage 3 those of the head
        prompt = [self._recomputed(count) if layout.zero >= 2 else (0, 0) for count in self._counts]
        deferred = [
            (count - sum(again)) * _WAITS * layer.made for count, again in zip(self._counts, prompt, strict=True)
        ]
        deferred[-1] += rest.made if layout.zero < 3 else 0.0
        return deferred

    def _about(self) -> float:
        """Of the first rank, which holds most microbatches."""
        layout = self._layout
        layers, _ = self._transient
        under_way = min(layout.count, layout.pp)
        held = under_way * layout.chunks * self._kept(self._counts[0])
        if layout.style == "interleaved":
            held *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
        others = [_Stage(0.0, self._counts[0], 0.0)] * (layout.chunks - 1)
        stages = [_Stage(max(self._at_ends), self._counts[0], 0.0), *others]
        held += max(layers, self._at_table - self._kept(self._counts[0]))
        return self._static(self.parameters()) + held + self._reducing(stages) + _MESSAGES * self.message

    def _stage(self, index: int) -> _Stage:
        before, behind = self._at_ends
        return _Stage(
            before if index == 0 else 0.0, self._counts[index], behind if index == len(self._counts) - 1 else 0.0
        )

    def _of_rank(self, rank: int, run: Run, curve: MemoryCurve) -> float:
        stages = run.placement.stages_of(rank)
        first, last = (run.placement.rank_of(stage) == rank for stage in (0, len(self._counts) - 1))
        own = [self._stage(stage) for stage in stages]
        parameters = sum(stage.before + stage.layers * self._rates.layer.parameters + stage.behind for stage in own)
        if first and last and self._task.tied:
            parameters -= self._table  # which it has once
        of_layers, of_head = self._transient
        if first and last and self._task.tied and self._layout.zero >= 2:  # the head's sum waits for that of the table
            of_head = max(of_head, self._rates.rest.early_top + 4 * self._table)
        here = run.of(rank)
        # what waits is bounded by what 1F1B's first rank would hold of stages like these
        room = min(self._layout.count, self._layout.pp) * sum(self._kept_by_stage[stage] for stage in stages)
        behind = curve.kept + _waiting(curve, run.actions.kinds[here], room)
        held = np.maximum(behind, np.concatenate([[0.0], behind[:-1]]))  # a backward begins with what it frees
        at_head = run.actions.stages[here] == len(self._counts) - 1
        highest = float((held + np.where(at_head, of_head, of_layers)).max())
        if first:
            at_end = self._at_table + self._unfilled(own[0])
            highest = max(highest, float(held.max()) - self._kept_by_stage[0] + at_end)
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
