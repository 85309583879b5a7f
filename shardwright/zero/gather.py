"""Bringing updated parameters to all ranks of a sub-group, one all-gather per bucket.

With `overlap`, step returns while gathers run, and a module waits for the buckets of its own parameters just before its
forward. Whoever else uses a parameter meanwhile (a functional call, `MultiheadAttention.out_proj`, an average of
weights) waits for its bucket too: see `param_guard`.

[Note: gathers under a profiler]
When an operation of gloo ends, it writes its end into the trace that saw it begin, also where that trace is over and
its memory is used for something else (torch 2.13: a message that is waited for behind its profile corrupts the heap).
So with gloo no gather stays under way beyond a step that is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.handle import Handle
from ..comm.quantised_wire import is_quantised
from ..ops.hooks_inside import ahead
from ..utils.labels import is_profiling, labelled
from ..utils.streams import streams_of
from .bucket import Bucket
from .collectives import all_gather_in_place
from .groups import Groups
from .param_guard import ParamGuard
from .quantised import gather_updates


class ParamGatherer:
    """Copies masters into the working parameters and gathers them.

    guard     of the parameters
    written   buckets whose masters have been copied already, when they are published next
    """

    guard: ParamGuard
    written: frozenset[int] = frozenset()

    def __init__(
        self,
        buckets: Sequence[Bucket],
        groups: Groups,
        model: nn.Module,
        device: torch.device,
        overlap: bool,
    ) -> None:
        # Forward needs the parts in their order, and the last bucket of a part's backward first.
        self._buckets = sorted(buckets, key=lambda bucket: (bucket.plan.family.section, -bucket.index))
        self._groups = {bucket.index: groups.of(bucket.plan.family).sharing for bucket in self._buckets}
        self._pending: dict[int, Handle[torch.Tensor]] = {}
        self._events: dict[int, Any] = {}
        self._params = {bucket.index: [slot.entry.param for slot in bucket.plan.slots] for bucket in self._buckets}
        self._homes = {param: index for index, params in self._params.items() for param in params}
        overlap = overlap and any(group is not None for group in self._groups.values())
        self._streams: Any = streams_of(device) if overlap else None
        self._stream = None if self._streams is None else self._streams.Stream(device)
        self.overlap = overlap
        self._hooks = self._install(model) if overlap else []
        self._release = weakref.finalize(self, _end, self._hooks, self._pending)  # modules may outlive this

    def begin(self, guard: ParamGuard) -> None:
        self.guard = guard

    def _install(self, model: nn.Module) -> list[Any]:
        me, hooks = weakref.ref(self), []
        for module in model.modules():
            buckets = sorted({self._homes[param] for param in module.parameters(recurse=False) if param in self._homes})
            if buckets:
                hooks.append(module.register_forward_pre_hook(ahead(partial(_before_module, me, buckets))))
        return hooks

    @torch.no_grad()
    def publish(self, exactly: bool = True) -> None:
        """Copy this rank's masters into its part of the working parameters and gather the other parts.

        exactly     also where the group quantises; else what was published exactly before is brought up to date (see
                    [Note: weights that all ranks hold alike] in `zero.quantised`)
        """
        self.wait()  # for those of the last step that nobody has used
        exact = {bucket.index: exactly or self._is_exact(bucket) for bucket in self._buckets}
        if self._stream is None:
            self._copy_masters([bucket for bucket in self._buckets if exact[bucket.index]])
            for bucket in self._buckets:
                self._start(bucket, exact[bucket.index])
        else:
            self._stream.wait_stream(self._streams.current_stream())
            with self._streams.stream(self._stream):
                for bucket in self._buckets:
                    if exact[bucket.index]:
                        self._copy_masters([bucket])
                    self._start(bucket, exact[bucket.index])
                    if bucket.index in self._pending:
                        self._pending.pop(bucket.index).wait()  # makes the side stream wait, not the host
                    self._events[bucket.index] = self._streams.Event()
                    self._events[bucket.index].record(self._stream)
        ends_in_trace = self._stream is None and is_profiling()  # see [Note: gathers under a profiler]
        if self.overlap and not ends_in_trace:
            on_their_way = self._pending.keys() | self._events.keys()
            self.guard.values_pending([param for index in on_their_way for param in self._params[index]], True)
        else:
            self.wait()
        self.written = frozenset()

    def written_by_steps(self) -> frozenset[int]:
        """Buckets whose working parameters a step may write with their masters: those that would be copied."""
        return frozenset(
            bucket.index
            for bucket in self._buckets
            if bucket.has_copies and self._is_exact(bucket) and bucket.master.device == bucket.flat.device
        )

    def _is_exact(self, bucket: Bucket) -> bool:
        group = self._groups[bucket.index]
        return group is None or not is_quantised(group)

    def _copy_masters(self, buckets: Sequence[Bucket]) -> None:
        copied = [bucket for bucket in buckets if bucket.has_copies and bucket.index not in self.written]
        if copied:
            torch._foreach_copy_(
                [bucket.own_flat for bucket in copied], [bucket.master for bucket in copied], non_blocking=True
            )

    @labelled(lambda _, bucket, exactly: f"gather bucket {bucket.index}")
    def _start(self, bucket: Bucket, exactly: bool) -> None:
        group = self._groups[bucket.index]
        if group is None:
            return
        tag = 2 * bucket.index + 1
        if exactly or not bucket.has_copies:
            self._pending[bucket.index] = all_gather_in_place(bucket.flat, group, tag)
        else:
            self._pending[bucket.index] = gather_updates(
                bucket.flat, bucket.low, bucket.high, bucket.master, group, tag
            )

    def wait(self, buckets: Iterable[int] | None = None) -> None:
        """Wait until these buckets (default: all) are complete on this rank."""
        if not self._pending and not self._events:
            return
        for index in list(self._params if buckets is None else buckets):
            handle, event = self._pending.pop(index, None), self._events.pop(index, None)
            if handle is not None:
                handle.wait()
            if event is not None:
                self._streams.current_stream().wait_event(event)
            if self.overlap and (handle is not None or event is not None):
                self.guard.values_pending(self._params[index], False)

    def values_wanted(self, params: Iterable[nn.Parameter]) -> None:
        """See `param_guard.ValueReads`."""
        self.wait(sorted({self._homes[param] for param in params}))

    def remove_hooks(self) -> None:
        self._release()


def _before_module(gatherer: weakref.ref[ParamGatherer], buckets: list[int], *_: Any) -> None:
    if torch.compiler.is_compiling():  # called before the graph
        return
    here = gatherer()
    if here is not None:
        here.wait(buckets)


def _end(hooks: list[Any], pending: dict[int, Handle[torch.Tensor]]) -> None:
    """Leave the model whole: what is under way needs nobody's help any more."""
    for hook in hooks:
        hook.remove()
    for handle in pending.values():
        handle.wait()
