"""What ranks tell each other while they save or load: small texts, over a process group of their own.

The group is separate from those of training, so that a background thread can use it while the main thread trains, and
it always runs on the host.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..cluster.groups import shared_group
from ..files.errors import CheckpointError

_PATIENCE = timedelta(hours=2)  # ranks wait here for the slowest writer


class Agreement:
    """The ranks that save together; `world_size` 1 needs no process group. Each purpose has a group, so that they
    may run at once.
    """

    def __init__(self, world_size: int, purpose: str = "checkpoints") -> None:
        self.world_size = world_size
        several = world_size > 1
        self._group = shared_group(("checkpoint", purpose), backend="gloo", timeout=_PATIENCE) if several else None

    def gather(self, value: Any) -> list[Any]:
        """JSON data of every rank, by rank."""
        if self._group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self._group)
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(texts, padded, group=self._group)
        return [json.loads(bytes(text[: int(length)].numpy())) for text, length in zip(texts, lengths, strict=True)]

    def broadcast(self, value: Any) -> Any:
        """JSON data of rank 0."""
        return self.gather(value)[0]

    def union(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self._group is None or not flags:
            return list(flags)
        merged = torch.tensor(flags, dtype=torch.uint8)
        dist.all_reduce(merged, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in merged.tolist()]

    def check(self, error: BaseException | None, what: str) -> None:
        """Raise on every rank if any rank brings an error: its own on the rank that has one, a CheckpointError
        elsewhere.
        """
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"{what} failed on rank {rank}: {text}", rank)


def attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """(result, None) or (None, the exception), so that ranks can agree before any of them raises."""
    try:
        with torch.no_grad():
            return function(), None
    except Exception as error:
        return None, error
