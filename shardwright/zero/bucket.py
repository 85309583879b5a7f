"""Reducing gradients bucket by bucket while backward runs.

A bucket's way, with the groups of `Groups`:

    shard group (k ranks)     reduce-scatter of the whole bucket: each rank gets the sum of its shard
    model axes                all-reduce of the shard over the axes that its gradients are partial over, and over tied copies
    replica group (d/k)       all-reduce of the shard across the sub-groups; at stage 0 (k = 1) the shard is the bucket

Sums stay raw: the mean over data-parallel ranks is part of the factor that the optimizer applies once per step.

[Note: order of launches] Collectives of one group must start in the same order on every rank, whatever order gradients arrive
in. So a bucket starts when it and all buckets before it (in its section) are complete; at the end of backward the rest start
with zeros in place of gradients that never came.

[Note: a second backward] A reduced shard holds the sum over ranks. If another backward adds to it before zero_grad, a second
reduction must not count that sum once per rank: `reopen` clears it everywhere but on its one keeper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ..cluster import job
from ..comm.handle import Handle
from .buffers import Bucket, ScratchPool
from .collectives import Scratch, reduce_scatter_in_place
from .exchange import SharedRows
from .layout import Slot

_MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class Groups:
    """Process groups of gradient reduction; None stands for a group of one.

    shard    the ZeRO sub-group
    replica  across sub-groups
    everyone shard x replica: all ranks that hold the same parameters
    axes     model axes (name -> group), for partial gradients and shared rows
    tied     tied group name -> group of the ranks with a copy
    """

    shard: dist.ProcessGroup | None
    replica: dist.ProcessGroup | None
    everyone: dist.ProcessGroup | None
    axes: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    tied: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        return 1 if self.shard is None else dist.get_world_size(self.shard)

    @property
    def shard_rank(self) -> int:
        return 0 if self.shard is None else dist.get_rank(self.shard)

    def after_scatter(self, bucket: Bucket) -> list[dist.ProcessGroup]:
        """The groups that a bucket's shard is all-reduced over."""
        family = bucket.plan.family
        groups = [self.axes[axis] for axis in family.partial]
        if family.tied is not None and family.tied in self.tied:
            groups.append(self.tied[family.tied])
        if self.replica is not None:
            groups.append(self.replica)
        return [group for group in groups if dist.get_world_size(group) > 1]


class _Window:
    """Progress of one section between two reductions: which slots are missing, which bucket is next."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.restart()

    def restart(self) -> None:
        self.missing = [set(bucket.plan.slots) for bucket in self.buckets]
        self.next = 0
        self.dirty = False  # whether a gradient has arrived


@dataclass
class _InFlight:
    """A bucket on its way; the reducer that launched it waits in `_settle`."""

    bucket: Bucket
    scatter: Handle[torch.Tensor]
    lent: list[torch.Tensor]
    copies: bool  # whether the scattered part must be moved into the shard
    groups: list[dist.ProcessGroup]  # all-reduces still to come
    final: bool  # whether the shard is complete after them
    work: dist.Work | None = None


class GradReducer:
    """Collects gradients in buckets and reduces them.

    keep_full           gradients accumulate in full buffers and are reduced once per step (stages 0, 1); else every backward is
                        reduced and only shards are kept (stage 2)
    overlap             collectives run while backward goes on; the numbers are the same either way
    wire_dtype          dtype on the wire, None for that of the gradients
    predivide           with a `wire_dtype` of its own, gradients are divided by this before they are rounded to it
    launch_in_backward  whether hooks may start collectives; a pipeline runtime calls `reduce` itself instead
    on_final            called with each bucket whose shard holds its final sum, on the stream that made it
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Groups,
        *,
        keep_full: bool,
        overlap: bool,
        wire_dtype: torch.dtype | None,
        predivide: float,
        launch_in_backward: bool,
        shared_rows: dict[int, SharedRows],
        on_final: Callable[[Bucket], None],
    ) -> None:
        self.buckets = list(buckets)
        self.groups = groups
        self.keep_full = keep_full
        self.overlap = overlap
        self.require_sync = True
        self.launch_in_backward = launch_in_backward
        self._wire_dtype = wire_dtype
        self._predivide = predivide
        self._shared_rows = shared_rows
        self._on_final = on_final
        device = self.buckets[0].device
        self._stream = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None
        self.pool = ScratchPool(device, max(bucket.plan.numel * self._wire(bucket).itemsize for bucket in self.buckets))
        sections = sorted({bucket.plan.family.section for bucket in self.buckets})
        self._windows = {s: _Window([bucket for bucket in self.buckets if bucket.plan.family.section == s]) for s in sections}
        self._places = {
            slot: (window, position)
            for window in self._windows.values()
            for position, bucket in enumerate(window.buckets)
            for slot in bucket.plan.slots
        }
        self._slots = {slot.entry.param: slot for slot in self._places}
        self._flying: list[_InFlight] = []
        self._generation = job.generation()
        self._reduced: set[int] = set()  # buckets whose shard holds a final sum
        self._filled: set[int] = set()  # buckets whose shard holds anything of this step (stage 2)
        self._dirty = True
        self.touched: set[int] = set()  # entries that got a gradient in this step
        self._hooks = [slot.entry.param.register_post_accumulate_grad_hook(partial(self._on_gradient, slot)) for slot in self._places]

    def _wire(self, bucket: Bucket) -> torch.dtype:
        return self._wire_dtype or bucket.master_dtype

    # Backward.

    def gradient_ready(self, param: nn.Parameter) -> None:
        """Say that `param` got its gradient without autograd's hooks (a deferred weight gradient)."""
        self._on_gradient(self._slots[param], param)

    def _on_gradient(self, slot: Slot, _: nn.Parameter) -> None:
        window, position = self._places[slot]
        self._collect(window, position, slot)
        if not self.launch_in_backward or not self._reduces_now:
            return
        if position < window.next:
            raise ValueError(
                f"{slot.entry.name}: a second gradient after its bucket was reduced; call backward through the booster (booster.backward), "
                "once per forward, with no_sync() around all but the last one of a step"
            )
        missing = window.missing[position]
        missing.discard(slot)
        if not missing and position == window.next:
            while window.next < len(window.buckets) and not window.missing[window.next]:
                self._launch_next(window)

    def _collect(self, window: _Window, position: int, slot: Slot) -> None:
        self._dirty = True
        window.dirty = True
        self.touched.add(slot.entry.index)
        if self.keep_full:
            window.buckets[position].collect(slot)

    @property
    def _reduces_now(self) -> bool:
        return self.require_sync or not self.keep_full

    def reopen(self) -> None:
        """Make buckets that were reduced without a zero_grad since ready for more gradients (see [Note: a second backward]).

        All ranks must be at the same point of their step: it waits for reductions that are under way.
        """
        if any(flight.final for flight in self._flying):
            self._settle_all()
        if not self._reduced:
            return
        self.wait_stream()
        for index in self._reduced:
            bucket = self.buckets[index]
            keeps = all(dist.get_rank(group) == 0 for group in self.groups.after_scatter(bucket))
            if bucket.grads is not None:
                bucket.grads[: bucket.low].zero_()
                bucket.grads[bucket.high :].zero_()
            if not keeps:
                bucket.shard_grad.zero_()
        self._reduced.clear()

    def reduce(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Start reducing all buckets of the sections that hold `params` (default: all), without hooks.

        For runtimes that know when gradients are complete, because deferred weight gradients bypass hooks. For the same reason
        every one of `params` counts as having a gradient, at stage 2 those whose .grad is set.
        """
        slots = list(self._places) if params is None else [self._slots[param] for param in params if param in self._slots]
        windows = {id(self._places[slot][0]): self._places[slot][0] for slot in slots}
        for slot in slots:
            if self.keep_full or slot.entry.param.grad is not None:
                self._collect(*self._places[slot], slot)
        for window in windows.values():
            if self.keep_full and any(bucket.index in self._reduced or self._is_flying(bucket) for bucket in window.buckets):
                raise ValueError("gradients were reduced already in this step; call zero_grad() before the next one")
            self._launch_rest(window)

    def after_backward(self) -> None:
        """Start what backward left: buckets with parameters that got no gradient."""
        if self._reduces_now and self.launch_in_backward:
            for window in self._windows.values():
                self._launch_rest(window)

    def finish(self) -> None:
        """Complete everything: afterwards every shard holds the raw sum over all ranks."""
        for window in self._windows.values():
            # Decided by what all ranks share: how far the window has come, not which gradients this rank happens to have.
            started = window.next > 0 or window.dirty
            waiting = [bucket for bucket in window.buckets if bucket.index not in self._reduced and not self._is_flying(bucket)]
            if waiting and (self.keep_full or started):
                self._launch_rest(window)
            window.restart()
        self._settle_all()
        for bucket in self.buckets:
            if bucket.index in self._reduced:
                continue
            if bucket.grads is None and bucket.index not in self._filled:
                bucket.shard_grad.zero_()
                self._filled.add(bucket.index)
            for group in self.groups.after_scatter(bucket):
                dist.all_reduce(bucket.shard_grad, group=group)
            self._complete(bucket)
        self.wait_stream()

    def _complete(self, bucket: Bucket) -> None:
        self._reduced.add(bucket.index)
        self._on_final(bucket)

    def _is_flying(self, bucket: Bucket) -> bool:
        return any(flight.bucket is bucket for flight in self._flying)

    # One bucket.

    def _launch_rest(self, window: _Window) -> None:
        while window.next < len(window.buckets):
            self._launch_next(window)
        window.restart()

    def _launch_next(self, window: _Window) -> None:
        bucket = window.buckets[window.next]
        window.next += 1
        with self._on_stream():
            scattering = [flight for flight in self._flying if flight.scatter.pending]
            if len(scattering) >= _MAX_IN_FLIGHT:
                self._advance(scattering[0])
            flight = self._launch(bucket)
            self._flying.append(flight)
            # Over axes other than data parallelism the peers may be at another point of their schedule: waiting for them here
            # could keep this rank from what they wait for.
            if self._stream is not None or not self.overlap:
                self._advance(flight)
                if bucket.plan.family.is_plain:
                    self._settle(flight)
            elif self.groups.shard is None:
                self._advance(flight)

    def _launch(self, bucket: Bucket) -> _InFlight:
        lent: list[torch.Tensor] = []

        def scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
            lent.append(self.pool.lend(numel, dtype))
            return lent[-1]

        buffer = self._fill(bucket, scratch)
        if bucket.index in self._shared_rows:
            self._shared_rows[bucket.index].sum_({slot.entry.index: bucket.view(buffer, slot) for slot in bucket.plan.slots})
        if self.groups.shard is None:
            scatter: Handle[torch.Tensor] = Handle("reduce_scatter", [], lambda: buffer)
        else:
            scatter = reduce_scatter_in_place(buffer, self.groups.shard, scratch, tag=2 * bucket.index)
        groups = self.groups.after_scatter(bucket) if self.require_sync else []
        return _InFlight(bucket, scatter, lent, copies=buffer is not bucket.grads, groups=groups, final=self.require_sync)

    def _fill(self, bucket: Bucket, scratch: Scratch) -> torch.Tensor:
        """The bucket's gradients side by side in the dtype of the wire."""
        wire = self._wire(bucket)
        if bucket.grads is not None:
            if wire == bucket.master_dtype:
                return bucket.grads
            return torch.mul(bucket.grads, 1.0 / self._predivide, out=scratch(bucket.plan.numel, wire))
        buffer = scratch(bucket.plan.numel, wire)
        present = [(slot, slot.entry.param.grad) for slot in bucket.plan.slots if slot.entry.param.grad is not None]
        if bucket.plan.has_gaps or len(present) < len(bucket.plan.slots):
            buffer.zero_()
        if present:
            torch._foreach_copy_([bucket.view(buffer, slot) for slot, _ in present], [grad for _, grad in present])
        for slot, grad in present:
            slot.entry.param.grad = None
            if self._stream is not None:
                grad.record_stream(self._stream)
        return buffer if wire == bucket.master_dtype else buffer.mul_(1.0 / self._predivide)

    def _advance(self, flight: _InFlight) -> None:
        """Wait for the reduce-scatter, move its result into the shard and start the next all-reduce."""
        bucket = flight.bucket
        if flight.scatter.pending:
            part = flight.scatter.wait()
            if bucket.grads is None and bucket.index in self._filled:
                bucket.shard_grad.add_(part)
            elif flight.copies:
                bucket.shard_grad.copy_(part)
                self._filled.add(bucket.index)
            for buffer in flight.lent:
                self.pool.give_back(buffer)
            flight.lent = []
        if flight.work is None and flight.groups:
            flight.work = dist.all_reduce(bucket.shard_grad, group=flight.groups.pop(0), async_op=True)

    def _settle(self, flight: _InFlight) -> None:
        """Bring one bucket to its final sum."""
        self._advance(flight)
        while flight.work is not None:
            flight.work.wait()
            flight.work = None
            self._advance(flight)
        if flight.final:
            self._complete(flight.bucket)
        self._flying.remove(flight)

    def _settle_all(self) -> None:
        with self._on_stream():
            for flight in self._flying:
                self._advance(flight)
            for flight in list(self._flying):
                self._settle(flight)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the side stream, after what the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def wait_stream(self) -> None:
        """Let the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def clear(self) -> None:
        """Forget this step's gradients."""
        if self._generation != job.generation():  # sums on their way through groups that were closed by a failure
            self._generation = job.generation()
            self._flying.clear()
        self._settle_all()
        self.wait_stream()
        for bucket in self.buckets:
            if bucket.grads is not None:
                if self._dirty:
                    bucket.grads.zero_()
                bucket.attach_gradients()
            else:
                for slot in bucket.plan.slots:
                    slot.entry.param.grad = None
        for window in self._windows.values():
            window.restart()
        self._dirty = False
        self._reduced.clear()
        self._filled.clear()
        self.touched.clear()

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
