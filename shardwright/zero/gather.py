"""Bringing updated parameters to all ranks of a sub-group, one all-gather per bucket.

With `overlap`, step returns while gathers run, and a module waits for the buckets of its own parameters just before its forward.
A parameter used outside the forward of the module that owns it (a functional call, `MultiheadAttention.out_proj`) would be missed,
so the first training forward is watched: parameters that got a gradient although no forward of an owner was seen are waited for at
the start of the model's forward from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.handle import Handle
from .buffers import Bucket
from .collectives import all_gather_in_place


class ParamGatherer:
    """Copies masters into the working parameters and gathers them."""

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup | None, models: Sequence[nn.Module], overlap: bool) -> None:
        self._buckets = list(reversed(buckets))  # forward needs the last bucket of backward first
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._pending: dict[int, Handle[torch.Tensor]] = {}
        self._events: dict[int, torch.cuda.Event] = {}
        device = buckets[0].device
        overlap = overlap and self._group is not None
        self._stream = torch.cuda.Stream(device) if overlap and device.type == "cuda" else None
        self.overlap = overlap
        self._hooks: list[Any] = []
        self._early: set[int] = set()  # buckets that the model's forward waits for at its start
        self._unseen: dict[int, set[int]] = {}  # entry -> bucket, for parameters whose owners were not seen to run yet
        if overlap:
            self._install(models)

    def _install(self, models: Sequence[nn.Module]) -> None:
        places = {slot.entry.param: (slot.entry.index, bucket.index) for bucket in self._buckets for slot in bucket.plan.slots}
        self._unseen = {entry: {bucket} for entry, bucket in places.values()}
        for model in models:
            # The root hook must run before those of the modules inside, also when the root itself owns parameters.
            self._hooks.append(model.register_forward_pre_hook(self._before_model, prepend=True))
            self._hooks.append(model.register_state_dict_pre_hook(lambda *_: self.wait()))
            for module in model.modules():
                owned = [places[param] for param in module.parameters(recurse=False) if param in places]
                if owned:
                    entries, buckets = {entry for entry, _ in owned}, sorted({bucket for _, bucket in owned})
                    self._hooks.append(module.register_forward_pre_hook(partial(self._before_module, entries, buckets)))

    @torch.no_grad()
    def publish(self) -> None:
        """Copy this rank's masters into its part of the working parameters and gather the other parts."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        for bucket in self._buckets:
            if self._stream is None:
                self._start(bucket)
                continue
            with torch.cuda.stream(self._stream):
                self._start(bucket)
                if bucket.index in self._pending:
                    self._pending.pop(bucket.index).wait()  # makes the side stream wait, not the host
                self._events[bucket.index] = torch.cuda.Event()
                self._events[bucket.index].record(self._stream)
        if not self.overlap:
            self.wait()

    def _start(self, bucket: Bucket) -> None:
        if bucket.master.data_ptr() != bucket.own_flat.data_ptr():
            bucket.own_flat.copy_(bucket.master, non_blocking=True)
        if self._group is not None:
            self._pending[bucket.index] = all_gather_in_place(bucket.flat, self._group, tag=2 * bucket.index + 1)

    def wait(self, buckets: Sequence[int] | None = None) -> None:
        """Wait until these buckets (default: all) are complete on this rank."""
        for index in list(self._pending if buckets is None else buckets):
            if index in self._pending:
                self._pending.pop(index).wait()
        for index in list(self._events if buckets is None else buckets):
            if index in self._events:
                torch.cuda.current_stream().wait_event(self._events.pop(index))

    def learn(self, touched: set[int]) -> None:
        """After the first backward: wait early for buckets of parameters that were used without a forward of their owner."""
        if self._unseen:
            self._early.update(bucket for entry, found in self._unseen.items() if entry in touched for bucket in found)
            self._unseen = {}

    def _before_model(self, *_: Any) -> None:
        if self._early:
            self.wait(sorted(self._early))

    def _before_module(self, entries: set[int], buckets: list[int], *_: Any) -> None:
        if self._unseen:
            for entry in entries:
                self._unseen.pop(entry, None)
        if self._pending or self._events:
            self.wait(buckets)

    def remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
