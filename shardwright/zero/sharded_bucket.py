"""A bucket of stage 3: this rank keeps its shard, and working parameters exist only while they are gathered.

    master   [shard]   what is kept, in the master's dtype; the optimizer steps on it
    flat     [numel]   storage without memory, but between `start_gather` and `free`; the parameters are views of it
    shown    [numel]   a gathered copy that a script's read has made: the parameters are views of it until `hide`

[Note: two gathered copies] Freeing takes the memory of `flat` away from everyone who looks at it: that is the point,
because autograd keeps the parameters of a forward for its backward, and finds them gathered again in the same storage.
A script that reads a parameter may keep what it got for as long as it likes, so it gets memory of its own. Both hold
the same values.

[Note: nothing to gather] Where one rank has the whole bucket, in the dtype that it works in and on its device,
`master`, `flat` and `shown` are one memory that always stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..comm.compat import without_torch_function
from ..comm.handle import Handle
from ..comm.quantised_wire import travels_quantised
from .bucket import Bucket
from .collectives import all_gather_in_place
from .layout import CUDA_BUCKET_BYTES, Slot
from .quantised import gather_masters


class ShardedBucket(Bucket):
    """See the module.

    filled   whether `flat` has memory, with values in it or on their way
    """

    filled = True
    shown: torch.Tensor | None = None
    _arriving: Handle[torch.Tensor] | None = None

    @property
    def is_whole(self) -> bool:
        """See [Note: nothing to gather]."""
        return self.plan.shards == 1 and self.master_dtype == self.dtype and not self.offload

    def _new_master(self) -> torch.Tensor:
        if self.is_whole:
            return self.flat
        if self.offload:
            return self._host_buffer()
        return torch.zeros(self.plan.shard_numel, dtype=self.master_dtype, device=self.device)

    @property
    def has_copies(self) -> bool:
        return not self.is_whole

    @property
    def seen(self) -> torch.Tensor:
        return self.flat if self.shown is None else self.shown

    def adopt(self, group: dist.ProcessGroup | None, most: int = CUDA_BUCKET_BYTES // 4) -> None:
        super().adopt(group, most)
        self._storage = self.flat.untyped_storage()
        self._num_bytes = self._storage.nbytes()
        self._own = self.own_flat
        # cannot be made while the memory is away
        self._views = [self.view(self.flat, slot) for slot in self.plan.slots]
        self.params = [slot.entry.param for slot in self.plan.slots]
        self.free()

    # For the model.

    @torch.no_grad()
    def start_gather(self, group: dist.ProcessGroup | None) -> None:
        """Begin to fill `flat` with all ranks' shards."""
        assert not self.filled
        self.filled = True
        if self.is_whole:
            return
        self._storage.resize_(self._num_bytes)
        tag = 2 * self.index + 1
        if group is not None and travels_quantised(self.flat, group):
            self._arriving = gather_masters(self.flat, self.master, group, tag)
            return
        self._own.copy_(self.master, non_blocking=True)
        if group is not None:
            self._arriving = all_gather_in_place(self.flat, group, tag)

    def finish_gather(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    @torch.no_grad()
    def free(self) -> None:
        """Take the memory of the working parameters; what the model has written to its own parameters goes into the
        masters first.
        """
        self.finish_gather()
        if self.is_whole:
            self.filled = False
            return
        self._follow_model()
        self.filled = False
        self._storage.resize_(0)

    def _follow_model(self) -> None:
        if self.shown is None:
            for slot, param, before in zip(self.plan.slots, self.params, self._versions, strict=True):
                if param._version != before:
                    self._follow(slot)
                    self.note_versions()

    def abandon(self) -> None:
        """Free without waiting for a gather that will never end; its memory stays until the next one, because
        messages may still land.
        """
        self._arriving = None
        self.filled = False

    # For scripts.

    def show(self, group: dist.ProcessGroup | None) -> None:
        """Give the parameters values that last. Collective over the sub-group, where they are not gathered already."""
        assert self.shown is None
        if self.is_whole:
            self.shown = self.flat
            return
        with torch.inference_mode(False), torch.no_grad():  # later forwards may train on what an evaluation was shown
            shown = torch.empty(self.plan.numel, dtype=self.dtype, device=self.device)
            if self.filled:
                self.finish_gather()
                self._follow_model()
                shown.copy_(self.flat)
            else:
                shown[self.low : self.high].copy_(self.master)
            if group is not None and not self.filled:
                all_gather_in_place(shown, group, tag=2 * self.index + 1).wait()
            self._look_at([self.view(shown, slot) for slot in self.plan.slots])
        self.shown = shown
        self.note_versions()

    @torch.no_grad()
    def hide(self) -> None:
        """The values that a script has seen are no longer those of the parameters."""
        if self.shown is not None:
            self.shown = None
            if not self.is_whole:
                self._look_at(self._views)
                self.note_versions()

    def _look_at(self, views: Sequence[torch.Tensor]) -> None:
        with without_torch_function():
            for param, view in zip(self.params, views, strict=True):
                param.data = view

    def holds(self, slot: Slot) -> bool:
        with without_torch_function():
            return slot.entry.param.untyped_storage().data_ptr() == self.seen.untyped_storage().data_ptr()

    @torch.no_grad()
    def take_assigned(self) -> None:
        with without_torch_function():
            for slot, param, view in zip(self.plan.slots, self.params, self._views, strict=True):
                if not param.numel() or self.holds(slot):
                    continue
                self._check_assigned(slot, view)
                values = param.data.reshape(-1)
                part = slot.part_in(self.low, self.high)
                if part is not None:
                    start = slot.start + part[0] - self.low
                    self.master[start : start + part[1] - part[0]].copy_(values[part[0] : part[1]])
                if self.shown is not None:
                    view = self.view(self.shown, slot)
                    view.copy_(param)
                param.data = view

    @torch.no_grad()
    def take_edits(self, written: Collection[nn.Parameter]) -> None:
        if self.shown is not None:
            super().take_edits(written)

    def values_of(self, slot: Slot) -> tuple[int, int, torch.Tensor]:
        """What this rank keeps of a parameter: (start, stop) of its flat range, and the elements in the master."""
        part = slot.part_in(self.low, self.high)
        if part is None:
            return 0, 0, self.master[:0]
        start = slot.start + part[0] - self.low
        return *part, self.master[start : start + part[1] - part[0]]

    def release(self) -> None:
        """Give the parameters storage of their own; they must be shown."""
        assert self.shown is not None
        for param in self.params:
            param.grad = None
            param.data = param.data.clone()
