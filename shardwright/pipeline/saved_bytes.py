"""How much memory a forward leaves behind for its backward.

    with measure(model_parameters) as saved:
        loss = forward()
    saved.bytes

Counted are the tensors that autograd saves, each memory once and parameters not at all, and the inputs of checkpointed regions. It is
the same number on every device, and does not depend on what else the process holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..utils.pytree import tree_leaves


class SavedBytes:
    """Bytes found so far; `parameters` are the addresses of memory that is there anyway."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.bytes = 0
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def note(self, value: Any) -> None:
        """Count the tensors in `value`."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._seen:
                    self._seen.add(storage.data_ptr())
                    self.bytes += storage.nbytes()


_measuring: list[SavedBytes] = []


@contextmanager
def measure(parameters: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Count what forwards in here leave behind."""
    saved = SavedBytes(parameters)
    _measuring.append(saved)

    def pack(tensor: Tensor) -> Tensor:
        saved.note(tensor)
        return tensor

    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield saved
    finally:
        _measuring.remove(saved)


def note_checkpointed(inputs: Any) -> None:
    """A checkpointed region keeps its inputs, where no hook on saved tensors sees them."""
    for saved in _measuring:
        saved.note(inputs)
