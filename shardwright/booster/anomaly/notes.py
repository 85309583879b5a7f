"""What a step needs to be run once more: what was called, what it was given, and the random numbers before it.

Notes are references, not copies, and those of one step: a step that was taken, left out or cleared has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...checkpoint import rng
from ...pipeline.batch.microbatch import batch_size, items_of
from ...pipeline.batch.ready import Microbatches

MOST = 64  # calls of one step: a script that never steps must not fill the memory with its batches


@dataclass
class Call:
    """
    again    runs it once more, forward and backward as it was
    given    the batches, or microbatches, that it was given; there once they are known
    states   of random generators, from before it
    settings  how a batch is split into microbatches (`pipeline.settings`)
    """

    again: Callable[[], Any]
    given: list[Any]
    states: dict[str, torch.Tensor]
    settings: Any = None

    def samples(self) -> int:
        """In a microbatch; 0 where that cannot be told."""
        try:
            whole = self.given[0]
            if isinstance(whole, Microbatches):
                return batch_size(whole[0])
            fixed = getattr(self.settings, "microbatch_size", None)
            return fixed or batch_size(whole) // (getattr(self.settings, "num_microbatches", None) or 1)
        except (IndexError, ValueError):
            return 0

    def entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of floating point, by name."""
        for whole in self.given:
            for batch in whole if isinstance(whole, Microbatches) else [whole]:
                for name, value in items_of(batch):
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        yield str(name), value


class Notes:
    """Of the calls since the last step."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.dropped = 0
        self.is_running_again = False

    def add(self, again: Callable[[], Any], given: list[Any], settings: Any = None) -> Call:
        call = Call(again, given, rng.get_states(), settings)
        self.calls.append(call)
        if len(self.calls) > MOST:
            del self.calls[0]
            self.dropped += 1
        return call

    def forget(self) -> None:
        self.calls.clear()
        self.dropped = 0


class Remembered:
    """`data_iter`, with what it gives put into a call's notes."""

    def __init__(self, data_iter: Any, call: Call) -> None:
        self._data_iter, self._call = data_iter, call

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._data_iter)
        self._call.given.append(batch)
        return batch
