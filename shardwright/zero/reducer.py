"""Reducing gradients bucket by bucket while backward runs.

A bucket's way, with the groups of `Groups`:

    shard group (k ranks)     reduce-scatter of the whole bucket: each rank gets the sum of its shard
    model axes                all-reduce of the shard over the axes that its gradients are partial over, and over tied
                              copies
    replica group (d/k)       all-reduce of the shard across the sub-groups; at stage 0 (k = 1) the shard is the bucket

A bucket that takes more scratch memory than `scratch_numel` elements goes in pieces, each a range of every shard, so
that what is lent stays bounded however large a parameter is.

Sums stay raw: the mean over data-parallel ranks is part of the factor that the optimizer applies once per step. On a
16-bit wire they are divided by a power of two that is at least the number of ranks, so that the sum fits, and
multiplied again on arrival, which loses nothing.

[Note: order of launches] Collectives of one group must start in the same order on every rank, whatever order gradients
arrive in. So a bucket starts when it and all buckets before it are complete, those of all sections that are reduced
together; at the end of backward the rest start with zeros in place of gradients that never came.

A rank that waits for a bucket in the middle of backward so waits for peers who lack one of its gradients to come to
the end of theirs. Those may wait in turn for this rank, where peers exchange tokens for each other's experts, or parts
of a sequence, in backward: there nothing starts before the end, unless a stream of its own does the waiting.

What a bucket may be asked for when is in [Note: states of gradients] (precision/grad_state.py).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from ..cluster import job
from ..cluster.heart import heart
from ..comm.collectives import all_reduce_in_place
from ..comm.compat import put_hook_last, without_torch_function
from ..comm.handle import Handle
from ..ops.weight_grad import told_late
from ..precision.grad_state import GradState
from ..utils.labels import labelled
from ..utils.streams import has_streams, streams_of
from .bucket import Bucket, ScratchPool
from .collectives import Scratch, reduce_scatter_in_place
from .flight import Flight
from .groups import Groups
from .layout import Slot, aligned
from .param_guard import drop_own_gradient, own_gradient
from .shared_rows import SharedRows
from .window import Window, next_of

_MAX_IN_FLIGHT = 2


class GradReducer:
    """Collects gradients in buckets and reduces them.

    keep_full           gradients accumulate in full buffers and are reduced once per step (stages 0, 1); else every
                        backward is reduced and only shards are kept (stage 2)
    overlap             collectives run while backward goes on; the numbers are the same either way
    wire_dtype          dtype on the wire, None for that of the gradients
    ranks               how many ranks' gradients are summed
    scratch_numel       most elements of a bucket that are on their way in one piece, where they are not reduced in
                        place
    launch_in_backward  whether every backward reduces; a pipeline runtime calls `open` and `reduce` itself instead
    peers_exchange      whether ranks that reduce together also wait for each other inside backward
    on_final            called with each bucket whose shard holds its final sum, on the stream that made it
    on_outside          called with the slot of a gradient that came in no backward of this reducer; it is added unless
                        that raises
    is_watched          whether a script has hooks beside those on parameters that may look at gradients
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Groups,
        device: torch.device,
        *,
        keep_full: bool,
        overlap: bool,
        wire_dtype: torch.dtype | None,
        ranks: float,
        scratch_numel: int,
        launch_in_backward: bool,
        peers_exchange: bool,
        shared_rows: dict[int, SharedRows],
        on_final: Callable[[Bucket], None],
        on_outside: Callable[[Slot], None],
        is_watched: Callable[[], bool],
    ) -> None:
        self.buckets = list(buckets)
        self.groups = groups
        self.keep_full = keep_full
        self.overlap = overlap
        self.require_sync = True
        self.launch_in_backward = launch_in_backward
        self._wire_dtype = wire_dtype
        self._predivide = (
            2.0 ** math.ceil(math.log2(ranks))
            if wire_dtype is not None and wire_dtype.itemsize < 4 and ranks > 1
            else 1.0
        )
        self._shared_rows = shared_rows
        self._on_final = on_final
        self._on_outside = on_outside
        self._is_watched = is_watched
        self._streams: Any = streams_of(device) if overlap else None
        self._stream = None if self._streams is None else self._streams.Stream(device)
        self._at_end = peers_exchange and self._stream is None  # see [Note: order of launches]
        self._pieces = {bucket.index: self._cut(bucket, scratch_numel) for bucket in self.buckets}
        self.pool = ScratchPool(device, max(map(self._scratch_bytes, self.buckets), default=0))
        sections = sorted({bucket.plan.family.section for bucket in self.buckets})
        self._windows = {
            s: Window([bucket for bucket in self.buckets if bucket.plan.family.section == s]) for s in sections
        }
        self._places = {
            slot: (window, position)
            for window in self._windows.values()
            for position, bucket in enumerate(window.buckets)
            for slot in bucket.plan.slots
        }
        self.slots = {slot.entry.param: slot for slot in self._places}
        self._open: list[Window] = []  # that wait for gradients of the backward that runs
        self._flying: list[Flight] = []
        self._in_parts: Bucket | None = None  # with pieces that are still to be launched
        self._ending = True  # whether what is reduced now completes the step's gradients
        self._fresh = False  # whether a backward has begun since everything was launched; the same on all ranks
        self.in_backward = False
        self._generation = job.generation()
        self._left_out: set[int] = set()  # numbers of slots for which autograd has come with no gradient
        self.touched: set[int] = set()  # entries that got a gradient in this step
        # entries whose gradients were set to zero, not None: they take part in steps from here on
        self._kept: set[int] = set()
        self._hooks = self._install()

    def _wire(self, bucket: Bucket) -> torch.dtype:
        return self._wire_dtype or bucket.master_dtype

    def _in_place(self, bucket: Bucket) -> bool:
        """Whether its gradients are reduced where they are. On the CPU what arrives from others needs room of its
        own.
        """
        same = self.keep_full and self._wire(bucket) == bucket.master_dtype
        return same and (self._shard_group(bucket) is None or has_streams(bucket.device))

    def _shard_group(self, bucket: Bucket) -> ProcessGroup | None:
        return self.groups.of(bucket.plan.family).shard

    def _cut(self, bucket: Bucket, most: int) -> list[tuple[int, int]]:
        """Ranges of a shard that are reduced one after the other."""
        numel = bucket.plan.shard_numel
        if self._in_place(bucket) or bucket.index in self._shared_rows:  # these are exchanged whole, and are small
            return [(0, numel)]
        length = aligned(-(-numel // -(-bucket.plan.numel // most)))
        return [(start, min(start + length, numel)) for start in range(0, numel, length)]

    def _scratch_bytes(self, bucket: Bucket) -> int:
        longest = max(stop - start for start, stop in self._pieces[bucket.index])
        return 0 if self._in_place(bucket) else bucket.plan.shards * longest * self._wire(bucket).itemsize

    def _install(self) -> Callable[[], Any]:
        """Put hooks on the parameters; returns what takes them off.

        autograd holds hooks where the garbage collector cannot see them, so they know this object and the parameters by
        number and weak reference only, and go when it goes.
        """
        me = weakref.ref(self)
        self._by_number = list(self._places)
        params = [slot.entry.param for slot in self._by_number]
        handles = [
            param.register_post_accumulate_grad_hook(told_late(partial(_arrived, me, number)))
            for number, param in enumerate(params)
        ]
        self._hook_numbers = {slot: handle.id for slot, handle in zip(self._by_number, handles, strict=True)}
        # autograd tells a parameter whose gradient a node leaves out as well
        seen = [param.register_hook(told_late(partial(_computed, me, number))) for number, param in enumerate(params)]
        return weakref.finalize(self, _remove, [*handles, *seen])

    # Backward.

    def bucket_of(self, slot: Slot) -> Bucket:
        return self._places[slot][0].buckets[self._places[slot][1]]

    def begin_backward(self) -> None:
        self.in_backward = True
        self.expect()
        if self.launch_in_backward:
            if (self._let_scripts_hook_first(self.buckets) or self._is_watched()) and self.keep_full:
                for bucket in self.buckets:  # hooks look at what is summed so far, as by plain torch
                    if bucket.dtype != bucket.master_dtype:  # else they do anyway
                        bucket.show_sums()
            self._open = [*self._windows.values()] if self._reduces_now else []
            for window in self._open:
                window.open()

    def _let_scripts_hook_first(self, buckets: Sequence[Bucket]) -> bool:
        """A script's hooks change gradients before they leave; whether there are any."""
        slots = [slot for bucket in buckets for slot in bucket.plan.slots]
        with without_torch_function():  # nobody is asked about hooks
            return sum(put_hook_last(slot.entry.param, self._hook_numbers[slot]) for slot in slots) > 0

    def open(self, sections: Collection[int], last: bool, of: Collection[nn.Parameter] | None = None) -> None:
        """For runtimes: gradients of one microbatch in `sections` are about to come. What they complete leaves at once.

        last  no more will come for the sections in this step
        of    the parameters that get one; default: all
        """
        for window in self._open:  # of a step that failed
            window.close()
        self._open = self._to_reduce(sections, last)
        self._ending = last
        awaited = None if of is None else {self.slots[param] for param in of if param in self.slots}
        for window in self._open:
            self._require_unreduced(window)
            self._let_scripts_hook_first(window.buckets)
            window.open(awaited)
        self._launch_complete()

    def _to_reduce(self, sections: Collection[int], last: bool) -> list[Window]:
        """Those of `sections` that have buckets, if they are reduced now."""
        if self.keep_full and not (last and self.require_sync):
            return []
        return [self._windows[section] for section in sections if section in self._windows]

    def expect(self) -> None:
        """Gradients are about to come."""
        self._fresh = True
        self.touched |= self._kept

    @property
    def takes_gradients(self) -> bool:
        """Whether what is added to the buffers now would be reduced with what is there."""
        return all(bucket.state is GradState.ACCUMULATING or self._is_held(bucket) for bucket in self.buckets)

    def on_gradient(self, slot: Slot) -> None:
        window, position = self._places[slot]
        bucket = window.buckets[position]
        if not self.in_backward:
            if not bucket.holds(slot):
                return  # the model has been boosted again, and this optimizer is of the past
            if self.launch_in_backward:
                self._on_outside(slot)
                self._collect(window, position, slot)
                return
        if not self.launch_in_backward and bucket.state is not GradState.ACCUMULATING and not self._is_held(bucket):
            raise ValueError(
                f"{slot.entry.name}: a gradient after those of its pipeline stage were reduced; pass a batch like this "
                "one as example_inputs= to the plugin, so that the pipeline knows which stages use the parameter"
            )
        self._collect(window, position, slot)
        if not window.is_open:
            return
        if position < window.next:
            raise ValueError(
                f"{slot.entry.name}: a second gradient after its bucket was reduced; call backward through the booster "
                "(booster.backward), once per forward, with no_sync() around all but the last one of a step; "
                "checkpoint a module that runs several times with use_reentrant=False"
            )
        window.missing[position].discard(slot)
        self._launch_complete()

    def _collect(self, window: Window, position: int, slot: Slot) -> None:
        bucket, index = window.buckets[position], slot.entry.index
        if bucket.collect(slot) if self.keep_full else own_gradient(slot.entry.param) is not None:
            self.touched.add(index)
        elif self.keep_full:  # a hook has dropped all; of shards, those of microbatches before count
            self.touched.discard(index)

    @property
    def _reduces_now(self) -> bool:
        return self.require_sync or not self.keep_full

    def set_aside(self, scale: float | torch.Tensor) -> None:
        """More gradients follow those that were reduced, which come back times `scale` when the next reduction is
        final.

        All ranks must be at the same point of their step: it waits for reductions that are under way.
        """
        if any(flight.final for flight in self._flying):
            self.settle()
        reduced = [bucket for bucket in self.buckets if bucket.state.is_reduced]
        if reduced:
            self._wait_stream()
        for bucket in reduced:
            bucket.set_aside(scale)

    def reduce(self, sections: Collection[int], last: bool = True) -> None:
        """For runtimes: start reducing what is left of `sections`, which were opened together or not at all. At stage 2
        also between microbatches, with `last` False.
        """
        windows = self._to_reduce(sections, last)
        for window in windows:
            if not window.is_open:
                self._require_unreduced(window)
            for slot in (slot for bucket in window.buckets[window.next :] for slot in bucket.plan.slots):
                if not self.keep_full and own_gradient(slot.entry.param) is not None:
                    self._collect(*self._places[slot], slot)
        self._ending = last
        self._launch_windows(windows)
        self._ending = True

    def _require_unreduced(self, window: Window) -> None:
        if self.keep_full and any(bucket.state is not GradState.ACCUMULATING for bucket in window.buckets):
            raise ValueError("gradients were reduced already in this step; call zero_grad() before the next one")

    def end_backward(self) -> None:
        """Start what backward left: buckets with parameters that got no gradient."""
        self.in_backward = False
        if self._reduces_now and self.launch_in_backward:
            self._launch_windows(self._windows.values())
            self._fresh = False

    def launch_rest(self) -> None:
        """Start all reductions that the step still needs, which follows from what all ranks share."""
        self.touched |= self._kept
        self._ending = True
        if self.keep_full or self._fresh:
            for window in self._windows.values():
                if any(bucket.state is GradState.ACCUMULATING or self._is_held(bucket) for bucket in window.buckets):
                    self._launch_windows([window])
        with self._on_stream():
            for flight in [flight for flight in self._flying if not flight.final]:
                self._settle(flight)
            for bucket in self.buckets:
                if bucket.state is GradState.ACCUMULATING:
                    self._launch_held(bucket)
        self._fresh = False

    def settle(self) -> None:
        """Wait for what is under way: afterwards every shard that was launched for good holds the raw sum over all
        ranks.
        """
        with self._on_stream():
            for flight in self._flying:
                self._advance(flight)
            for flight in list(self._flying):
                self._settle(flight)
        self._wait_stream()

    # One bucket.

    def _launch_complete(self) -> None:
        if self._at_end:
            return
        while (window := next_of(self._open)) is not None and window.has_complete:
            self._launch_next(window)

    def _launch_windows(self, windows: Collection[Window]) -> None:
        while (window := next_of(windows)) is not None:
            self._launch_next(window)
        for window in windows:
            window.close()
        self._open = [window for window in self._open if window.is_open]

    def _launch_next(self, window: Window) -> None:
        bucket = window.buckets[window.next]
        window.next += 1
        heart.bucket = bucket.index
        if bucket.state is not GradState.ACCUMULATING and not self._is_held(bucket):
            return  # launched before, by a runtime that reduces part by part
        with self._on_stream():
            for earlier in [flight for flight in self._flying if flight.bucket is bucket]:  # the microbatch before
                self._settle(earlier)
        for slot in bucket.assigned():
            self._collect(window, window.next - 1, slot)
        bucket.complete()
        *first, last = range(len(self._pieces[bucket.index]))
        self._in_parts = bucket
        for number in first:
            self._launch_piece(bucket, number)
        self._in_parts = None
        self._launch_piece(bucket, last)
        bucket.empty = False

    @labelled(lambda _, bucket, number: f"reduce bucket {bucket.index}" + (f", part {number}" if number else ""))
    def _launch_piece(self, bucket: Bucket, number: int) -> None:
        self._make_room()
        lent: list[torch.Tensor] = []

        def scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
            lent.append(self.pool.lend(numel, dtype))
            return lent[-1]

        rows = self._fill(bucket, number, scratch)  # on the stream of the backward, which goes on when they are copied
        with self._on_stream():
            if bucket.index in self._shared_rows:
                whole = rows.view(-1)
                self._shared_rows[bucket.index].sum_(
                    {slot.entry.index: bucket.view(whole, slot) for slot in bucket.plan.slots}
                )
            shard_group = self._shard_group(bucket)
            if shard_group is None:
                scatter: Handle[torch.Tensor] = Handle("reduce_scatter", [], lambda: rows[0])
            else:
                tag = 2 * (bucket.index + number * len(self.buckets))
                scatter = reduce_scatter_in_place(rows, shard_group, scratch, tag=tag)
            flight = self._fly(bucket, scatter, lent, self._pieces[bucket.index][number])
            # Over axes other than data parallelism the peers may be at another point of their schedule: waiting for
            # them here could keep this rank from what they wait for.
            if self._stream is not None or not self.overlap:
                self._advance(flight)
                if bucket.plan.family.is_plain:
                    self._settle(flight)
            elif shard_group is None:
                self._advance(flight)

    def _make_room(self) -> None:
        """Wait for what was launched long ago, so that few buffers are lent."""
        with self._on_stream():
            scattering = [flight for flight in self._flying if flight.scattering]
            if len(scattering) >= _MAX_IN_FLIGHT:
                self._advance(scattering[0])
            plain = [flight for flight in self._flying if flight.bucket.plan.family.is_plain]
            summing = [flight for flight in plain if flight.lent and not flight.scattering]
            if len(summing) >= _MAX_IN_FLIGHT:
                self._settle(summing[0])

    def _is_held(self, bucket: Bucket) -> bool:
        """Whether it is under way to this rank's shard only (stage 2 under no_sync, or between microbatches)."""
        return any(flight.bucket is bucket and not flight.final for flight in self._flying)

    def _launch_held(self, bucket: Bucket) -> None:
        """Complete a shard that holds the sum over its sub-group already, or nothing."""
        if bucket.empty:
            bucket.shard_grad.zero_()
            bucket.empty = False
        self._advance(self._fly(bucket, None, [], (0, bucket.plan.shard_numel)))

    def _fly(
        self, bucket: Bucket, scatter: Handle[torch.Tensor] | None, lent: list[torch.Tensor], piece: tuple[int, int]
    ) -> Flight:
        final = (self.require_sync and self._ending) or scatter is None
        fresh = bucket.empty or bucket.grads is not None
        groups = self.groups.after_scatter(bucket.plan.family) if final else []
        flight = Flight(bucket, *piece, fresh, scatter, lent, groups, final)
        bucket.state = GradState.LAUNCHED
        self._flying.append(flight)
        return flight

    def _fill(self, bucket: Bucket, number: int, scratch: Scratch) -> torch.Tensor:
        """Gradients of a piece in the dtype of the wire, [shards, elements]."""
        wire, shards, (start, stop) = self._wire(bucket), bucket.plan.shards, self._pieces[bucket.index][number]
        if bucket.grads is not None:
            rows = bucket.grads.view(shards, -1)[:, start:stop]
            if wire == bucket.master_dtype:
                return rows
            buffer = scratch(shards * (stop - start), wire).view(shards, -1)
            return torch.mul(rows, 1.0 / self._predivide_of(bucket), out=buffer)
        if self._shard_group(bucket) is None and bucket.empty and wire == bucket.master_dtype:
            buffer = bucket.shard_grad[start:stop].view(1, -1)  # whose sum is this rank's alone: written once
        else:
            buffer = scratch(shards * (stop - start), wire).view(shards, -1)
        present = [(slot, grad) for slot in bucket.plan.slots if (grad := own_gradient(slot.entry.param)) is not None]
        empty = bucket.plan.gaps(buffer, start) if len(present) == len(bucket.plan.slots) else [buffer]
        if empty:
            torch._foreach_zero_(empty)
        if len(self._pieces[bucket.index]) == 1:
            views = bucket.views_in(buffer.view(-1))
            copies = [(views[slot], grad) for slot, grad in present]
        else:
            copies = [pair for slot, grad in present for pair in bucket.plan.parts_of(slot, grad, buffer, start)]
        if copies:
            torch._foreach_copy_([there for there, _ in copies], [here for _, here in copies])
        if number == len(self._pieces[bucket.index]) - 1:
            for slot, _ in present:
                drop_own_gradient(slot.entry.param)
        return buffer if self._predivide_of(bucket) == 1.0 else buffer.mul_(1.0 / self._predivide_of(bucket))

    def _predivide_of(self, bucket: Bucket) -> float:
        return 1.0 if self._wire(bucket) == bucket.master_dtype else self._predivide

    def _advance(self, flight: Flight) -> None:
        """Wait for the reduce-scatter, and start the next all-reduce."""
        if flight.part is None:
            flight.part = self._bring_in(flight)
        if flight.work is None and flight.groups:
            flight.work = all_reduce_in_place(flight.part, flight.groups.pop(0), async_op=True)

    def _bring_in(self, flight: Flight) -> torch.Tensor:
        """What is to be all-reduced: the shard itself, or its copy in the dtype of the wire in a lent buffer."""
        bucket, wire = flight.bucket, self._wire(flight.bucket)
        shard, scale = flight.shard, self._predivide_of(bucket)
        narrow = wire != bucket.master_dtype and bool(flight.groups)
        if flight.scatter is not None:
            part = flight.scatter.wait()
            if flight.fresh:
                if narrow:
                    return part
                if part.data_ptr() != shard.data_ptr():
                    shard.copy_(part)
                    if scale != 1.0:
                        shard.mul_(scale)
            else:
                shard.add_(part, alpha=scale)
        self._give_back(flight)
        if not narrow:
            return shard
        flight.lent = [self.pool.lend(shard.numel(), wire)]
        return torch.mul(shard, 1.0 / scale, out=flight.lent[0])

    def _give_back(self, flight: Flight) -> None:
        for buffer in flight.lent:
            self.pool.give_back(buffer)
        flight.lent = []

    def _settle(self, flight: Flight) -> None:
        """Bring one piece to its final sum."""
        self._advance(flight)
        while flight.work is not None:
            flight.work.wait()
            flight.work = None
            self._advance(flight)
        bucket, shard = flight.bucket, flight.shard
        assert flight.part is not None
        if flight.part.data_ptr() != shard.data_ptr():
            shard.copy_(flight.part)
            if self._predivide_of(bucket) != 1.0:
                shard.mul_(self._predivide_of(bucket))
        self._give_back(flight)
        self._flying.remove(flight)
        if bucket is self._in_parts or any(other.bucket is bucket for other in self._flying):
            return
        if not flight.final:
            bucket.state = GradState.ACCUMULATING
            return
        if bucket.carry is not None:
            bucket.shard_grad.add_(bucket.carry)
        bucket.state = GradState.FINAL
        self._on_final(bucket)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Run on the side stream, after what the current stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(self._streams.current_stream())
        with nullcontext() if self._stream is None else self._streams.stream(self._stream):
            yield

    def _wait_stream(self) -> None:
        """Let the current stream wait for the side stream."""
        if self._stream is not None:
            self._streams.current_stream().wait_stream(self._stream)

    def clear(self, keep_zeros: bool = False) -> None:
        """Forget this step's gradients. With `keep_zeros` those that there were are zero from here on, as torch's
        zero_grad(set_to_none=False) leaves them, not absent."""
        self._kept = self._kept | self.touched if keep_zeros else set()
        if self._generation != job.generation():  # sums on their way through groups that were closed by a failure
            self._generation = job.generation()
            self._flying.clear()
            self._in_parts = None
        self.settle()
        for bucket in self.buckets:
            bucket.forget_gradients()
            if self._kept:
                bucket.show_sums(self._kept)
        for window in self._windows.values():
            window.close()
        self._open = []
        self._fresh, self._ending = False, True
        self.touched.clear()

    def remove_hooks(self) -> None:
        self._hooks()


def _computed(reducer: weakref.ref[GradReducer], number: int, grad: torch.Tensor | None) -> None:
    here = reducer()
    if here is not None:
        (here._left_out.add if grad is None else here._left_out.discard)(number)
        if grad is not None and not grad.is_contiguous() and here.in_backward and here.keep_full:
            slot = here._by_number[number]
            here.bucket_of(slot).take_in_place(slot, grad)


def _arrived(reducer: weakref.ref[GradReducer], number: int, _: nn.Parameter) -> None:
    here = reducer()
    if here is None:
        return
    if number in here._left_out:
        here._left_out.discard(number)
    else:
        here.on_gradient(here._by_number[number])


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
