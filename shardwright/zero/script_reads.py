"""`param.grad` as a script sees it between a backward and zero_grad: the gradient that the next step will use, or a
refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ..precision.grad_state import GradState
from .layout import Slot
from .param_guard import own_gradient, set_own_gradient

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer

INSTEAD = (
    "clip with the plugin's max_norm=, optimizer.clip_grad_by_norm(max_norm) or optimizer.clip_grad_by_value(value), "
    "look at optimizer.get_grad_norm() or optimizer.gradients(), and empty them with optimizer.zero_grad()"
)


class ScriptReads:
    """Answers for the gradients of `optimizer` (see `param_guard` and [Note: states of gradients]); starts no
    collective.

    dropped  numbers of parameters whose .grad was set to None
    """

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._num_params = len(optimizer.reducer.slots)
        self.dropped: set[int] = set()

    def read_gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        optimizer = self._optimizer
        slot = optimizer.reducer.slots.get(param)
        if slot is None:
            return own_gradient(param)  # frozen
        if slot.entry.index in self.dropped:
            return None
        self._require_whole(slot)
        if optimizer.mesh.world_size == 1 and slot.entry.index not in optimizer.reducer.touched:
            return None
        optimizer.hand_out_gradients()
        return optimizer.reducer.bucket_of(slot).whole_gradient(slot)

    def write_gradient(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """None for every parameter is zero_grad; None for some of them is refused when it would matter."""
        optimizer = self._optimizer
        slot = optimizer.reducer.slots.get(param)
        if slot is None:
            set_own_gradient(param, value)
            return
        if value is None:
            self.dropped.add(slot.entry.index)
            if len(self.dropped) == self._num_params:
                optimizer.zero_grad()
            return
        self._require_whole(slot)
        optimizer.hand_out_gradients()
        with torch.no_grad():
            optimizer.reducer.bucket_of(slot).whole_gradient(slot).copy_(value)
        optimizer.reducer.touched.add(slot.entry.index)
        self.dropped.discard(slot.entry.index)

    def refuse_dropped(self) -> None:
        if self.dropped:
            raise ValueError(
                f"param.grad = None for {len(self.dropped)} of {self._num_params} parameters: call "
                "optimizer.zero_grad() to drop all gradients; to leave parameters out of a step set "
                "requires_grad_(False) on them before its backward"
            )

    def _require_whole(self, slot: Slot) -> None:
        """Whether this rank has the whole gradient, and needs nobody to complete it."""
        optimizer, mesh = self._optimizer, self._optimizer.mesh
        name = f"{slot.entry.name}.grad"
        sizes = {axis: mesh.size(axis) for axis in ("dp", "tp", "pp", "sp", "ep") if mesh.size(axis) > 1}
        if optimizer.settings.cpu_offload:
            raise ValueError(f"{name}: with cpu_offload=True gradients are stepped in host memory; {INSTEAD}")
        if sizes and (optimizer.stage > 0 or sizes.keys() != {"dp"}):
            layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise ValueError(
                f"{name}: between backward and zero_grad this rank ({layout}, ZeRO stage {optimizer.stage}) holds only "
                "a part of the gradients, and torch.nn.utils.clip_grad_norm_ would scale each rank by a norm of its "
                f"own; {INSTEAD}"
            )
        if sizes and any(bucket.state is GradState.ACCUMULATING for bucket in optimizer.buckets):
            raise ValueError(
                f"{name}: under no_sync this rank has the gradient of its own samples only; look after the last "
                f"backward, or {INSTEAD}"
            )
