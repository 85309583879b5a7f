"""Bytes that are alive at once while a piece of code runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.kernels.lazy_logits import LazyLogits


class Peak(TorchDispatchMode):
    """Bytes of what operators have returned and is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._met: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta and not isinstance(leaf, LazyLogits):
                storage = leaf.untyped_storage()
                self._met.setdefault(storage._cdata, StorageWeakRef(storage))
        total = 0
        for key, reference in list(self._met.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._met[key]
            else:
                total += storage.nbytes()
        self.most = max(self.most, total)
        return result
