"""How much memory a forward leaves behind for its backward.

    with measure(model_parameters) as saved:
        loss = forward()
    saved.bytes

Counted are the tensors that autograd saves, each memory once and parameters not at all, and the inputs of checkpointed
regions. It is the same number on every device, and does not depend on what else the process holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..comm.compat import without_torch_function
from ..utils.pytree import tree_leaves


class Storages:
    """Memory that was met, by storage; it stays alive, so that its identity does."""

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._met: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> int:
        """Bytes of the tensor's memory; 0 where it was met before."""
        storage = tensor.untyped_storage()
        if id(storage) in self._met:
            return 0
        self._met[id(storage)] = storage
        return storage.nbytes()

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._met


class SavedBytes:
    """Bytes found so far; `parameters` are there anyway."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.bytes = 0
        with without_torch_function():  # where they lie is no question about their values
            self._met = Storages(parameters)

    def note(self, value: Any) -> None:
        """Count the tensors in `value`."""
        tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout is torch.strided)
        self.bytes += sum(map(self._met.add, tensors))


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
    """What is kept where no hook of `measure` sees it: inputs of a checkpointed region, and what other hooks inside
    of these take.
    """
    for saved in _measuring:
        saved.note(inputs)
