"""Communication in flight: what is moving, who owns it and where it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Handle(Generic[T]):
    """One or more asynchronous operations and the value they produce.

    The owner is whoever started the operation; it is the only one to call `wait`. `wait` may be called more than once and
    returns the same value each time; the buffers named by `keep` stay alive until then, because the backend reads them.
    """

    __slots__ = ("_finish", "_keep", "_value", "_works", "label")

    def __init__(self, label: str, works: Sequence[dist.Work | None], finish: Callable[[], T], keep: object = None) -> None:
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
