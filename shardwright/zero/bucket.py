"""The tensors of one bucket.

    flat     [numel]        working parameters, in the working dtype; the model's parameters are views of it
    grads    [numel]        accumulated gradients in the master's dtype (`full` only)
    shard_grad [shard]      this rank's part of the gradients: a view of `grads`, or a buffer of its own
    carry    [shard]        gradients of the step that were reduced before more came; made only then
    master   [shard]        what the optimizer steps on: a view of `flat` where the dtypes agree, else a copy in fp32

[Note: who holds gradients] With `full` gradients (stages 0 and 1) they are summed in `grads`. Autograd makes one per
parameter and microbatch, and as it arrives it goes over to `grads`: the first of a step is copied, the others are
added, and what got none is set to zero when the bucket leaves. So a first gradient moves 8 bytes an element (of bf16 6,
see `grad_dtypes`); to set `grads` to zero and have autograd add to it in place moves 16 (of bf16 22).

From then on .grad is the view of `grads`, to which autograd adds in place, so that whoever looks at it in a backward
(hooks of any kind) finds what plain torch has there. Not where `grads` has a wider dtype than the gradients: autograd
would have to convert each before it adds, so .grad is None between them, but for hooks that can be seen (`show_sums`).
.grad is the view from the start in pipelines, where weight gradients that wait add themselves (`ops.weight_grad`), and
where autograd would clone a gradient for the parameter's strides.

Without (stage 2) the reducer collects the gradients of a bucket when the last one has arrived.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.compat import without_torch_function
from ..precision.grad_state import GradState
from ..precision.policy import HALF
from ..utils.streams import host_memory, streams_of
from ..utils.tensors import multiply_
from .layout import CUDA_BUCKET_BYTES, FROZEN, BucketPlan, Slot
from .param_guard import own_gradient, set_own_gradient


def master_dtype(working: torch.dtype, master_weights: bool) -> torch.dtype:
    return torch.float32 if master_weights and working in HALF else working


class Bucket:
    """Storage of `plan` on the rank that owns `shard`.

    It comes in two parts, so that buckets can be filled one after the other, each taking the place of the storage that
    its parameters leave, before any of them gets gradients: `adopt`, then `make_gradients`.
    """

    grads: torch.Tensor | None
    shard_grad: torch.Tensor
    step_grad: torch.Tensor  # gradients as the optimizer steps on them: in host memory when the master lies there
    grad_views: dict[Slot, torch.Tensor]

    def __init__(
        self,
        plan: BucketPlan,
        index: int,
        shard: int,
        *,
        device: torch.device,
        master_weights: bool,
        offload: bool,
    ) -> None:
        self.plan = plan
        self.index = index
        self.shard = shard
        self.device = device
        self.low, self.high = plan.shard_range(shard)
        self.dtype = plan.family.dtype
        self.master_dtype = master_dtype(self.dtype, master_weights)
        self.offload = offload
        self.flat = torch.zeros(plan.numel, dtype=self.dtype, device=device)
        self.master = self._new_master()
        self.state = GradState.ACCUMULATING
        self.empty = True  # whether the gradient buffers hold nothing of this step
        self.carry: torch.Tensor | None = None
        self._own_views: dict[Slot, torch.Tensor] = {}
        self._unwritten: set[Slot] = set()  # of which `grads` holds nothing of this step, and anything else
        self._shown: set[Slot] = set()  # of which .grad is the view of `grads`, unless a script has put another there
        self._gaps: list[torch.Tensor] | None = None  # what no parameter lies in of `grads`
        self._preset = False
        self._zeros = -1  # how often `grads` had been written to when it was all zeros last
        self._versions: list[int] = []
        self._addresses: list[int] = []  # of the parameters' views

    def _new_master(self) -> torch.Tensor:
        if self.offload:
            return self._host_buffer()
        if self.master_dtype == self.dtype:
            return self.flat[self.low : self.high]
        return torch.zeros(self.plan.shard_numel, dtype=self.master_dtype, device=self.device)

    def _host_buffer(self) -> torch.Tensor:
        return host_memory((self.plan.shard_numel,), self.master_dtype, self.device).zero_()

    def view(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        return flat[slot.start : slot.stop].view(slot.entry.param.shape)

    def views_in(self, flat: torch.Tensor) -> dict[Slot, torch.Tensor]:
        """Every parameter's view of `flat` [numel]. Those of the bucket's own gradients are made once."""
        if flat.data_ptr() != self.shard_grad.data_ptr():
            return {slot: self.view(flat, slot) for slot in self.plan.slots}
        if not self._own_views:
            self._own_views = {slot: self.view(self.shard_grad, slot) for slot in self.plan.slots}
        return self._own_views

    def holds(self, slot: Slot) -> bool:
        """Whether the parameter still lies in `flat`."""
        return slot.entry.param.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    @property
    def own_flat(self) -> torch.Tensor:
        """This rank's part of the working parameters."""
        return self.flat[self.low : self.high]

    @property
    def is_trained(self) -> bool:
        return self.plan.slots[0].entry.group != FROZEN

    @property
    def seen(self) -> torch.Tensor:
        """[numel]: what the parameters are views of."""
        return self.flat

    @torch.no_grad()
    def adopt(self, group: dist.ProcessGroup | None, most: int = CUDA_BUCKET_BYTES // 4) -> None:
        """Move the parameters' values in, take the first rank's where `group` is given, and turn the parameters into
        views.

        Values pass through buffers of at most `most` elements in the master's dtype, so that a model loaded in fp32
        keeps its fp32 values as masters.
        """
        for start in range(0, self.plan.numel, most):
            self._take_values(start, min(start + most, self.plan.numel), group)
        for slot in self.plan.slots:
            param = slot.entry.param
            param.grad = None
            param.data = self.view(self.flat, slot)
        self._addresses = [slot.entry.param.data_ptr() for slot in self.plan.slots]
        self.note_versions()

    def _take_values(self, start: int, stop: int, group: dist.ProcessGroup | None) -> None:
        same = self.master_dtype == self.dtype
        values = (
            self.flat[start:stop] if same else torch.zeros(stop - start, dtype=self.master_dtype, device=self.device)
        )
        for slot in self.plan.slots:
            part = slot.part_in(start, stop)
            if part is not None:
                place = slot.start + part[0] - start
                values[place : place + part[1] - part[0]].copy_(slot.entry.param.reshape(-1)[part[0] : part[1]])
        if group is not None and dist.get_world_size(group) > 1:
            dist.broadcast(values, group=group, group_src=0)
        if not same:
            self.flat[start:stop].copy_(values)
        first, last = max(start, self.low), min(stop, self.high)
        if first < last and self.master.data_ptr() != self.own_flat.data_ptr():
            self.master[first - self.low : last - self.low].copy_(values[first - start : last - start])

    def make_gradients(self, full: bool, preset: bool = False) -> None:
        """Room for gradients; `full`: for those of the whole bucket, which .grad shows where they are `preset` (see
        [Note: who holds gradients]).
        """
        self.grads = torch.zeros(self.plan.numel, dtype=self.master_dtype, device=self.device) if full else None
        if self.grads is not None:
            self.shard_grad = self.grads[self.low : self.high]
        else:
            self.shard_grad = torch.zeros(self.plan.shard_numel, dtype=self.master_dtype, device=self.device)
        self._own_views = {}
        self.step_grad = self._host_buffer() if self.offload else self.shard_grad
        self.grad_views = (
            {slot: self.view(self.grads, slot) for slot in self.plan.slots} if self.grads is not None else {}
        )
        self._gaps = None
        self._preset = preset
        self._unwritten = set(self.grad_views)
        self._show_preset()

    def _show_preset(self) -> None:
        if self._preset:
            self.complete()
            for slot in self.grad_views:
                self._point_at(slot)
            self._zeros = -1 if self.grads is None else self.grads._version

    def show_sums(self, of: Collection[int] | None = None) -> None:
        """Have autograd add to the views of `grads`, as .grad of the parameters (of all entries, or of those with these
        numbers), until gradients are forgotten.
        """
        for slot, view in self.grad_views.items():
            if of is not None and slot.entry.index not in of:
                continue
            if (own := own_gradient(slot.entry.param)) is not None and own is not view:
                self.collect(slot)  # what a script has put there
            self._point_at(slot)

    def _point_at(self, slot: Slot) -> None:
        view, param = self.grad_views[slot], slot.entry.param
        self._shown.add(slot)
        if own_gradient(param) is not view:
            if slot in self._unwritten:
                self._unwritten.discard(slot)
                view.zero_()
            set_own_gradient(param, None)
            param.grad_dtype = view.dtype  # type: ignore[attr-defined]  # torch's stubs lack it
            set_own_gradient(param, view)

    def take_in_place(self, slot: Slot, grad: torch.Tensor) -> None:
        """Have autograd add `grad`, which it would clone to give it the parameter's strides, to the view of `grads`."""
        if own_gradient(slot.entry.param) is None and grad.dtype == self.master_dtype:
            self._point_at(slot)

    def complete(self) -> None:
        """Nothing more comes: what got no gradient has zeros for one, and so has what no parameter lies in (a factor
        that is not finite made NaN of it).
        """
        if self.grads is None:
            return
        if len(self._unwritten) == len(self.plan.slots):
            zeros = [self.grads]
        else:
            if self._gaps is None:
                rows = self.grads.view(self.plan.shards, -1)
                self._gaps = [] if self._preset else self.plan.gaps(rows, 0)  # preset ones begin at zero
            zeros = self._gaps + [self.grad_views[slot] for slot in self._unwritten]
        if zeros:
            torch._foreach_zero_(zeros)
        self._unwritten.clear()

    def assigned(self) -> list[Slot]:
        """Whose .grad is what a script has put there, or a backward that no bucket was told of."""
        slots = self.plan.slots
        grads = [own_gradient(slot.entry.param) for slot in slots]
        views = self.grad_views
        return [s for s, grad in zip(slots, grads, strict=True) if grad is not None and grad is not views.get(s)]

    @property
    def has_copies(self) -> bool:
        """Whether masters are copies, which do not see what is written to the working parameters."""
        return self.master.data_ptr() != self.own_flat.data_ptr()

    def note_versions(self) -> None:
        """Remember how often autograd has counted each parameter as written to (publishing writes to `flat`, which
        is not counted).
        """
        if self.has_copies:
            self._versions = [slot.entry.param._version for slot in self.plan.slots]

    @torch.no_grad()
    def take_assigned(self) -> None:
        """Take the values of parameters that were given other storage (`param.data = tensor`), and make them views
        again.
        """
        with without_torch_function():
            assigned = [
                slot
                for slot, address in zip(self.plan.slots, self._addresses, strict=True)
                if slot.entry.param.data_ptr() != address
            ]
            for slot in assigned:
                param, view = slot.entry.param, self.view(self.flat, slot)
                self._check_assigned(slot, view)
                view.copy_(param)
                param.data = view
                self._follow(slot)

    @staticmethod
    def _check_assigned(slot: Slot, view: torch.Tensor) -> None:
        param = slot.entry.param
        if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
            raise ValueError(
                f"{slot.entry.name}.data = a tensor of {_describe(param)} after boost: the optimizer knows this "
                f"parameter as {_describe(view)}; assign one like that, or change the model before booster.boost"
            )

    @torch.no_grad()
    def take_edits(self, written: Collection[nn.Parameter]) -> None:
        """Let the masters of parameters that were written to in place since `note_versions` follow, and of those in
        `written`.
        """
        for slot, before in zip(self.plan.slots, self._versions, strict=bool(self._versions)):
            if slot.entry.param._version != before or slot.entry.param in written:
                self._follow(slot)
        self.note_versions()

    def _follow(self, slot: Slot) -> None:
        """Take into the master what was written to a parameter; elements that were left alone keep what rounding has
        cut off.
        """
        part = slot.part_in(self.low, self.high) if self.has_copies else None
        if part is not None:
            where = slice(slot.start + part[0] - self.low, slot.start + part[1] - self.low)
            master = self.master[where]
            working = self.seen[self.low : self.high][where].to(master.device)
            master.copy_(torch.where(working == master.to(working.dtype), master, working.to(master.dtype)))

    def whole_gradient(self, slot: Slot) -> torch.Tensor:
        """The gradient of a parameter, where this rank has all of it."""
        return self.view(self.grads if self.grads is not None else self.shard_grad, slot)

    def set_aside(self, scale: float | torch.Tensor) -> None:
        """Move the reduced gradients, times `scale`, to `carry`, and let what accumulates begin at zero."""
        assert self.state.is_reduced
        if self.carry is None:
            self.carry = torch.empty_like(self.shard_grad)
        self.carry.copy_(self.step_grad)
        multiply_([self.carry], scale)
        self._empty_views()
        self.state, self.empty = GradState.ACCUMULATING, True

    def forget_gradients(self) -> None:
        """Begin a step: gradients are zero, and .grad of the parameters as it was after boost."""
        self._empty_views()
        if self.grads is None:
            for slot in self.plan.slots:
                slot.entry.param.grad = None
        self.state, self.empty, self.carry = GradState.ACCUMULATING, True, None

    def _empty_views(self) -> None:
        """Nothing of `grads` is of this step."""
        # collectives, as of tied weights that this rank has not used, are not among the writes that are counted
        is_zero = self._preset and self.empty and self.grads is not None and self.grads._version == self._zeros
        if not is_zero:
            self._unwritten = set(self.grad_views)
            self._shown.clear()
            for slot in self.grad_views:
                set_own_gradient(slot.entry.param, None)
        self._show_preset()

    def collect(self, slot: Slot) -> bool:
        """Make sure the gradient that backward just produced for `slot` is in `grads`; whether there is one."""
        self.empty = False
        grad = own_gradient(slot.entry.param)
        if grad is self.grad_views[slot]:  # mostly, so that nothing is entered for it
            return True
        if not torch.is_grad_enabled():  # in backwards, but for those that make a graph
            return self._take(slot, grad)
        with torch.no_grad():
            return self._take(slot, grad)

    def _take(self, slot: Slot, grad: torch.Tensor | None) -> bool:
        view, param = self.grad_views[slot], slot.entry.param
        if grad is None:
            if slot in self._shown:  # a hook has dropped all that there was
                self._shown.discard(slot)
                self._unwritten.add(slot)
                if self._preset:
                    self._point_at(slot)
                return False
            return slot not in self._unwritten
        if slot in self._unwritten or slot in self._shown:  # where a hook has put another tensor, it is the sum
            self._unwritten.discard(slot)
            view.copy_(grad)
        else:
            view.add_(grad)
        if slot in self._shown or grad.dtype == view.dtype:
            self._shown.add(slot)
            set_own_gradient(param, view)
        else:
            set_own_gradient(param, None)
        return True

    def release(self) -> None:
        """Give the parameters storage of their own again."""
        for slot in self.plan.slots:
            slot.entry.param.grad = None
            slot.entry.param.data = slot.entry.param.data.clone()

    def bytes(self) -> int:
        """Bytes this bucket keeps on its device between steps, without optimizer states."""
        tensors = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in self._tensors()}
        return sum(storage.nbytes() for storage in tensors.values())

    def _tensors(self) -> list[torch.Tensor]:
        own = [self.flat, self.master, *((self.shard_grad, self.step_grad) if self.is_trained else ())]
        return own + [tensor for tensor in (self.grads, self.carry) if tensor is not None]


def _describe(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"


class ScratchPool:
    """Buffers lent for the time of one collective and kept for the next: nothing is allocated in the steady state.

    All have `capacity` bytes, enough for the largest piece, so that there are as many as are in use at once and no
    more. On CUDA a buffer may be lent on one stream and given back on another: the next to borrow it waits, on its
    stream, for what was queued until then.
    """

    def __init__(self, device: torch.device, capacity: int) -> None:
        self._device = device
        self.capacity = capacity
        self._free: list[tuple[torch.Tensor, Any]] = []
        self.allocated = 0

    def lend(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        needed = numel * dtype.itemsize
        assert needed <= self.capacity, f"{needed} bytes asked of buffers of {self.capacity}"
        if not self._free:
            self.allocated += 1
            self._free.append((torch.empty(self.capacity, dtype=torch.uint8, device=self._device), None))
        buffer, given_back = self._free.pop()
        if given_back is not None:
            given_back.wait()
        return buffer[:needed].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        storage = buffer.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (storage.nbytes(),), (1,))
        streams = streams_of(self._device)
        event = None if streams is None else streams.Event()
        if event is not None:
            event.record()
        self._free.append((whole, event))

    @property
    def bytes(self) -> int:
        return self.allocated * self.capacity
