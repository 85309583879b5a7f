"""What the inner optimizer steps on: a few flat pieces of the master shards per param group, or whole parameters.

[Note: parameters without a gradient] torch skips a parameter whose .grad is None: no decay, no step count. In a flat
piece that parameter would be stepped with a zero gradient instead. So a piece is cut where parameters without a
gradient begin and end, the first time that happens, and from then on the cut-out piece has .grad None in such steps.
State tensors are cut with the piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ..optim.kind import begin_state
from .bucket import Bucket
from .layout import Run, Slot, plan_runs


class Segment:
    """One tensor of the inner optimizer: `tensor` views elements [start, stop) of the bucket's master shard."""

    def __init__(self, bucket: Bucket, run: Run) -> None:
        self.bucket = bucket
        self.run = run
        shape = run.slots[0].entry.param.shape if bucket.plan.whole else (-1,)
        self.tensor = bucket.master[run.start : run.stop].view(shape)
        self.grad = bucket.step_grad[run.start : run.stop].view(shape)
        self.tensor.grad = self.grad

    def part(self, slot: Slot) -> tuple[slice, tuple[int, int]]:
        """Where `slot` lies in the flattened tensor, and which flat range of the parameter that is."""
        low = self.bucket.low
        part = slot.part_in(low + self.run.start, low + self.run.stop)
        assert part is not None
        offset = slot.start + part[0] - low - self.run.start
        return slice(offset, offset + part[1] - part[0]), part

    def parts(self) -> Iterator[tuple[Slot, slice, tuple[int, int]]]:
        for slot in self.run.slots:
            where, part = self.part(slot)
            yield slot, where, part


class Segments:
    """All segments of this rank. The optimizer object and its group dicts stay the user's.

    The groups hold segments while the optimizer steps and the script's parameters otherwise: clipping, freezing or
    averaging what is in `param_groups` does to parameters what it does in one process, or is refused as it is for
    `model.parameters()`.
    """

    def __init__(self, buckets: Sequence[Bucket], optim: Optimizer) -> None:
        self._optim = optim
        self._buckets = buckets
        self._cut: set[Slot] = set()
        self.items = [Segment(bucket, run) for bucket in buckets for run in plan_runs(bucket.plan, bucket.shard)]
        with self.installed():
            begin_state(optim)

    @contextmanager
    def installed(self, none: bool = False) -> Iterator[None]:
        """Inside, the optimizer's groups hold the segments; `none`: nothing."""
        groups = self._optim.param_groups
        shown = [group["params"] for group in groups]
        for number, group in enumerate(groups):
            mine = [] if none else [segment.tensor for segment in self.items if segment.run.group == number]
            group["params"] = mine
        try:
            yield
        finally:
            for group, params in zip(groups, shown, strict=True):
                group["params"] = params

    def set_touched(self, touched: set[int] | None) -> None:
        """Give gradients to the parameters numbered in `touched` (None: to all) and withhold them from the others."""
        if touched is None:
            for segment in self.items:
                segment.tensor.grad = segment.grad
            return
        untouched = {slot for segment in self.items for slot in segment.run.slots if slot.entry.index not in touched}
        self.cut(
            {
                slot
                for segment in self.items
                if len(segment.run.slots) > 1
                for slot in segment.run.slots
                if slot in untouched
            }
        )
        for segment in self.items:
            segment.tensor.grad = None if segment.run.slots[0] in untouched else segment.grad

    def cut(self, slots: set[Slot]) -> None:
        """Give each of `slots` segments of its own, with the state cut at the same places."""
        if slots <= self._cut:
            return
        self._cut |= slots
        items = []
        for old in self.items:
            if not slots.intersection(old.run.slots):
                items.append(old)
                continue
            state = self._optim.state.pop(old.tensor, None)
            for run in plan_runs(old.bucket.plan, old.bucket.shard, self._cut):
                if old.run.start <= run.start < old.run.stop:
                    items.append(Segment(old.bucket, run))
                    if state:
                        self._optim.state[items[-1].tensor] = _cut_state(state, old, run)
        self.items = items

    def grads(self) -> list[torch.Tensor]:
        """Gradients of the step, of the segments that have one."""
        return [segment.tensor.grad for segment in self.items if segment.tensor.grad is not None]

    def state_of(self, segment: Segment) -> dict[str, Any]:
        return self._optim.state.get(segment.tensor, {})


def is_elementwise_state(value: Any, segment: Segment) -> bool:
    """Whether an optimizer's state entry has one element per element of the segment (moments), rather than counting
    steps.
    """
    return isinstance(value, torch.Tensor) and value.shape == segment.tensor.shape


def _cut_state(state: dict[str, Any], old: Segment, run: Run) -> dict[str, Any]:
    start, stop = run.start - old.run.start, run.stop - old.run.start
    result: dict[str, Any] = {}
    for key, value in state.items():
        if is_elementwise_state(value, old):
            result[key] = value[start:stop]
        else:
            result[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return result
