"""Buffers that data-parallel ranks have in common: running statistics and other state that forward passes change."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn


class SharedBuffers:
    """The persistent buffers of a model, which `share` sets to those of rank 0 of `group`, one collective per dtype.

    Non-persistent buffers (rotary frequencies, masks) are computed from the configuration, so they are shared once, by
    `share_all`.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._homes = [
            (module, name)
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and not buffer.is_meta
        ]

    @property
    def are_needed(self) -> bool:
        """Whether there is anything to share and anybody to share it with."""
        return bool(self._homes) and self._group.size() > 1

    def share(self) -> None:
        """A collective over the group."""
        if self.are_needed:
            broadcast_buffers((module._buffers[name] for module, name in self._homes), self._group)


def share_all(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Start all ranks of `group` from the buffers of its first rank."""
    if group.size() > 1:
        broadcast_buffers((buffer for buffer in model.buffers() if not buffer.is_meta), group)


@torch.no_grad()
def broadcast_buffers(buffers: Iterable[torch.Tensor | None], group: dist.ProcessGroup) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in buffers:
        if buffer is not None:
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for several in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in several])
        dist.broadcast(flat, group=group, group_src=0)
        for buffer, value in zip(several, flat.split([buffer.numel() for buffer in several]), strict=True):
            buffer.copy_(value.view(buffer.shape))
