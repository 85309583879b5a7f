"""Bytes of tensors that are alive, counted by what torch's operators are given and return: the same on every device,
and without what an allocator keeps beside them.

    with LiveBytes() as live:
        model, optimizer = ...
        kept, most = live.of_steps(step)       between steps, and the most within one
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..kernels.lazy_logits import LazyLogits
from ..utils.pytree import TorchDispatchMode, tree_leaves


class LiveBytes(TorchDispatchMode):
    """Every memory that an operator of this block was given or has returned, and that is still there.

    given      whether memory counts that operators were given and have not made here
    looked_at  bytes of a new memory that make it worth while to look whether there have never been more
    most       bytes, since it was set last
    """

    def __init__(self, looked_at: int = 0, given: bool = True) -> None:
        super().__init__()
        self._given = given
        self._met: dict[int, StorageWeakRef] = {}
        self._looked_at = looked_at
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        large = False
        for leaf in tree_leaves((args, kwargs, result) if self._given else result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not isinstance(leaf, LazyLogits):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._met:
                    self._met[storage._cdata] = StorageWeakRef(storage)
                    large |= storage.nbytes() > self._looked_at
        if large:
            self.most = max(self.most, self.bytes())
        return result

    def bytes(self) -> int:
        """Now. A storage may have been emptied and filled since it was met."""
        total = 0
        for key, reference in list(self._met.items()):
            # checked on torch 2.13: StorageWeakRef says by itself only whether it has expired
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._met[key]
            else:
                total += storage.nbytes()
        return total

    def of_steps(self, step: Callable[[], None]) -> tuple[int, int]:
        """Bytes kept between steps, and the most within one; the first makes what lasts."""
        step()
        gc.collect()
        self.most = kept = self.bytes()
        step()
        return kept, self.most
