"""Messages on their way: what is moving, which tensors it needs, and where it is waited for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .compat import is_through
from .payload import Header, put_together
from .quantised import dequantise


class Sent:
    """A message on its way out: its operations and the tensors they read.

    The communicator owns it: it lets go of the tensors when it finds that they have been read, and waits for that in
    the end. Who learns in another way that the message has arrived, such as by the answer to it, calls `wait` to let go
    of the data at once.
    """

    __slots__ = ("_tensors", "_works")

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    @property
    def pending(self) -> bool:
        """Whether nobody has waited for it yet."""
        return bool(self._works)

    def is_completed(self) -> bool:
        return all(map(is_through, self._works))

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []


class Receive:
    """A message to come. Its owner takes it once, where the data is needed, by `wait` or `wait_tensors`.

    packed  which of its tensors arrive quantised
    """

    __slots__ = ("_buffers", "_packed", "_works", "header")

    def __init__(
        self, header: Header, buffers: list[Tensor], works: list[dist.Work], packed: Sequence[bool] = ()
    ) -> None:
        self._packed = packed or [False] * len(buffers)
        self.header = header
        self._buffers = buffers
        self._works = works

    @property
    def pending(self) -> bool:
        """Whether nobody has waited for it yet, so that the backend may still write to its buffers."""
        return bool(self._works)

    def complete(self) -> None:
        """Wait until the data is here, and leave it where it is. On CUDA only the current stream waits."""
        for work in self._works:
            work.wait()
        self._works = []

    def wait_tensors(self) -> list[Tensor]:
        """The tensors of the message, none of which requires grad yet."""
        self.complete()
        buffers, self._buffers = self._buffers, []
        return [
            dequantise(buffer, math.prod(meta.shape), meta.dtype).view(meta.shape) if packed else buffer
            for buffer, meta, packed in zip(buffers, self.header.tensors, self._packed, strict=True)
        ]

    def wait(self) -> Any:
        """The payload; tensors that require grad on the sending side do so here, as leaves."""
        tensors = self.wait_tensors()
        for tensor, meta in zip(tensors, self.header.tensors, strict=True):
            if meta.requires_grad:
                tensor.requires_grad_()
        return put_together(self.header, tensors)
