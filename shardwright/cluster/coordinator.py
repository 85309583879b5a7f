"""Questions and small rituals between processes: who am I, print once, one after the other."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
R = TypeVar("R")


class DistCoordinator:
    """This process among the others. Works before `launch` too, as a world of one."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def is_master(self, process_group: dist.ProcessGroup | None = None) -> bool:
        """Whether this is rank 0 of the group (of the world by default)."""
        return self._rank_in(process_group) == 0

    def is_node_master(self) -> bool:
        return self.local_rank == 0

    def is_last_process(self, process_group: dist.ProcessGroup | None = None) -> bool:
        size = dist.get_world_size(process_group) if dist.is_initialized() else 1
        return self._rank_in(process_group) == size - 1

    def print_on_master(self, msg: str, process_group: dist.ProcessGroup | None = None) -> None:
        if self.is_master(process_group):
            print(msg, flush=True)

    def print_on_node_master(self, msg: str) -> None:
        if self.is_node_master():
            print(msg, flush=True)

    def block_all(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank of the group is here."""
        if dist.is_initialized():
            dist.barrier(group=process_group)

    @contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> Iterator[None]:
        """`executor_rank` runs the block first, the others after it: for downloads and caches on a shared disk."""
        first = self._rank_in(process_group) == executor_rank
        if not first:
            self.block_all(process_group)
        try:
            yield
        finally:
            if first:
                self.block_all(process_group)

    def on_master_only(
        self, process_group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Decorator: only rank 0 runs the function; the others return None."""

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            @functools.wraps(function)
            def run(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return run

        return decorate

    def _rank_in(self, process_group: dist.ProcessGroup | None) -> int:
        return dist.get_rank(process_group) if dist.is_initialized() else 0
