"""What runs inside a block, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """Counts the c10d ops that run inside, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))


class CountBytes(TorchDispatchMode):
    """Bytes that this rank sends inside, by the ring formulas; `by_dtype` tells in which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.by_dtype: Counter[torch.dtype] = Counter()

    @property
    def bytes(self) -> float:
        return sum(self.by_dtype.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._count(func._opname, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name == "send":
            sent, share = args[0][0], 1.0
        elif name in ("alltoall_base_", "_allgather_base_", "_reduce_scatter_base_"):
            ranks = dist.ProcessGroup.unbox(args[2]).size()
            sent, share = args[1], ranks - 1.0 if name == "_allgather_base_" else (ranks - 1) / ranks
        elif name == "allreduce_":
            ranks = dist.ProcessGroup.unbox(args[1]).size()
            sent, share = args[0][0], 2 * (ranks - 1) / ranks
        else:
            return
        self.by_dtype[sent.dtype] += sent.nbytes * share
