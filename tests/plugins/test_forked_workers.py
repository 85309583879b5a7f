"""Workers of a dataloader are forked from a rank: what lies about in the rank must not stop them."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import shardwright
from shardwright.testing import run_ranks


class Collecting(Dataset):
    """Its workers collect garbage, which any worker does sooner or later."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        fork_and_wait()  # a library that a worker uses may do so
        gc.collect()
        return torch.tensor(index)


def leave_as_garbage(group: dist.ProcessGroup | None) -> None:
    cycle: dict[str, Any] = {"group": group}
    cycle["itself"] = cycle


def fork_and_wait() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def read_with_workers(rank: int, world: int) -> None:
    shardwright.launch(rank, world, None, None)
    gc.disable()  # else it is chance whether the garbage is still there when the workers start
    leave_as_garbage(dist.new_group())
    leave_as_garbage(dist.group.WORLD)
    dist.destroy_process_group()
    batches = DataLoader(Collecting(), num_workers=2, timeout=10, multiprocessing_context="fork")
    assert [int(batch) for batch in batches] == [0, 1, 2, 3]
    assert gc.get_freeze_count() == 0, "the rank itself goes on collecting"
    assert gc.collect() > 0
    gc.freeze()  # the script's own
    fork_and_wait()
    assert gc.get_freeze_count() > 0


def test_workers_do_not_wait_for_threads_of_dropped_groups() -> None:
    run_ranks(read_with_workers, 2, debug="OFF", timeout=60)
