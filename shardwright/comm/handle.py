"""Communication in flight: what is moving, who owns it and where it is waited for.

[Note: orphans]
gloo forgets a message whose operation is dropped before it is through, and then nothing else gets through between the
two ranks: every later collective of the group hangs (torch 2.13). So the messages of an owner that goes away, such as
those of an optimizer that is dropped after a backward, live on as orphans. Only a wait tells that a gloo message is
through, and it would hang where another rank never sent. So they are waited for at the next boost, which all ranks
reach, if all have as many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch.distributed as dist

from ..cluster import job

T = TypeVar("T")


class Handle(Generic[T]):
    """One or more asynchronous operations and the value they produce.

    The owner is whoever started the operation; it is the only one to call `wait`. `wait` may be called more than once
    and returns the same value each time; the buffers named by `keep` stay alive until then, because the backend reads
    them.
    """

    __slots__ = ("_finish", "_keep", "_value", "_works", "label")

    def __init__(
        self, label: str, works: Sequence[dist.Work | None], finish: Callable[[], T], keep: object = None
    ) -> None:
        self.label = label
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], T] | None = finish
        self._keep = keep
        self._value: T | None = None

    @property
    def pending(self) -> bool:
        return self._finish is not None

    def wait(self) -> T:
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._value = self._finish()
            self._finish, self._keep, self._works = None, None, []
        return self._value  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"Handle({self.label!r}, {'pending' if self.pending else 'done'})"


class Messages(Handle[T]):
    """A `Handle` on messages between two ranks each. See [Note: orphans]."""

    __slots__ = ("_connections",)

    def __init__(
        self, label: str, works: Sequence[dist.Work | None], finish: Callable[[], T], keep: object = None
    ) -> None:
        super().__init__(label, works, finish, keep)
        self._connections = job.connections()

    def __del__(self) -> None:
        if self.pending and self._connections == job.connections():
            _orphans.append(_Orphan(self._works, self._keep, self._connections))


class _Orphan(NamedTuple):
    works: list[dist.Work]
    keep: object
    connections: tuple[int, int]  # later ones know nothing of it


_orphans: list[_Orphan] = []


def count_orphans() -> int:
    """How many owners' messages nobody has waited for."""
    _orphans[:] = [orphan for orphan in _orphans if orphan.connections == job.connections()]
    return len(_orphans)


def settle_orphans() -> None:
    """Wait for the messages whose owner is gone. Collective over all ranks, which must have as many of them."""
    while _orphans:
        for work in _orphans[0].works:
            work.wait()
        del _orphans[0]
