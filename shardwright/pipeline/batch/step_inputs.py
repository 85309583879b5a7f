"""The microbatches of one step, as the model gets them, and which of them look alike to what comes before the
layers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import torch

from ...utils.transfer import needs_transfer
from .microbatch import Batch, items_of

_PLAIN = (type(None), bool, int, float, complex, str)
_numbers = itertools.count()

_MOST_BYTES = 1 << 22  # of one tensor that is compared by content; larger ones count as different


class StepInputs:
    """Microbatches of a step.

    cast  gives the model's copy of a microbatch the dtype that it works in
    host  the same microbatches in host memory, where the batch came from there and was moved to a device; called when
          first asked for
    """

    def __init__(
        self,
        microbatches: Sequence[Batch],
        cast: Callable[[Batch], Batch] = lambda batch: batch,
        host: Callable[[], Sequence[Batch]] | None = None,
    ) -> None:
        self.microbatches = microbatches
        self.calls: dict[Hashable, Any] = {}  # where `LayerCalls` keeps what it has found
        self._cast = cast
        self._host = host
        self._host_microbatches: Sequence[Batch] | None = None
        self._number = next(_numbers)
        self._frames: dict[int, Hashable] = {}
        self._groups: dict[tuple[Hashable, frozenset[Any]], dict[int, tuple[Hashable, int]]] = {}

    def past(self, index: int) -> Any:
        """What the model gets of what came before, where microbatches are cut along the sequence."""
        return None

    def batch(self, index: int) -> Batch:
        return self._cast(self.microbatches[index])

    @cached_property
    def has_host(self) -> bool:
        values = [value for microbatch in self.microbatches for _, value in items_of(microbatch)]
        return self._host is not None or all(
            value.device.type == "cpu" for value in values if isinstance(value, torch.Tensor)
        )

    def on_host(self, index: int) -> Batch:
        """What the model gets of a microbatch, in host memory; where it `has_host`."""
        return self._cast(self.microbatches[index] if self._host is None else self._in_host_memory(index))

    def _in_host_memory(self, index: int) -> Batch:
        if self._host_microbatches is None:
            assert self._host is not None
            self._host_microbatches = self._host()
        return self._host_microbatches[index]

    def frame(self, index: int) -> Hashable:
        """Equal for microbatches that differ in nothing but the contents of tensors."""
        if index not in self._frames:
            self._frames[index] = tuple(
                (key, value.shape, value.dtype, value.device)
                if isinstance(value, torch.Tensor)
                else (key, *self._name(value))
                for key, value in items_of(self.microbatches[index])
            )
        return self._frames[index]

    def _name(self, value: Any) -> tuple[Any, Any]:
        """Of what is no tensor. Objects other than numbers may hold something else in the next step, or be others at
        the same address.
        """
        return (type(value), value) if isinstance(value, _PLAIN) else (self._number, id(value))

    def group(self, index: int, read: frozenset[Any]) -> tuple[Hashable, int]:
        """(name of the group, its size): microbatches of a group are equal but for the contents of entries that are
        not in `read`.
        """
        frame = self.frame(index)
        if (frame, read) not in self._groups:
            alike = [i for i in range(len(self.microbatches)) if self.frame(i) == frame]
            contents = [self._contents(i, read, alike[0]) for i in alike]
            numbers = {content: number for number, content in enumerate(dict.fromkeys(contents))}
            sizes = Counter(contents)
            self._groups[frame, read] = {
                i: ((frame, read, numbers[content]), sizes[content]) for i, content in zip(alike, contents, strict=True)
            }
        return self._groups[frame, read][index]

    def contents(self, index: int, read: frozenset[Any]) -> Hashable | None:
        """Equal for microbatches of any step whose entries in `read` have equal contents; None where that is not
        known.
        """
        found = self._contents(index, read, index)
        return found if all(isinstance(content, bytes) for content in found) else None

    def _contents(self, index: int, read: frozenset[Any], first: int) -> tuple[Hashable, ...]:
        found: list[Hashable] = []
        of_first = dict(items_of(self.microbatches[first]))
        for key, value in items_of(self.microbatches[index]):
            if key in read:
                shared = index != first and value is of_first.get(key)  # given whole to every microbatch
                found.append(self._content(first if shared else index, key, of_first[key] if shared else value))
        return tuple(found)

    def _content(self, index: int, key: Any, value: Any) -> Hashable:
        """The bytes, read without waiting for a device; or a number of its own."""
        if not isinstance(value, torch.Tensor):
            return id(value)
        if self._host is not None and needs_transfer(value.device):
            value = dict(items_of(self._in_host_memory(index)))[key]
        if value.device.type != "cpu" or value.numel() * value.element_size() > _MOST_BYTES:
            return index
        return value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
