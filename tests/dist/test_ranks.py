"""The rank pool itself."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from shardwright.testing import RankError, run_ranks


def add_up(rank: int, world_size: int, base: torch.Tensor, scale: float = 1.0) -> tuple[int, torch.Tensor]:
    total = base * (rank + 1) * scale
    dist.all_reduce(total)
    return world_size, total


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        wait_for_godot()
    dist.barrier()


def wait_for_godot() -> None:
    time.sleep(1000)


def die_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_results_and_tensors() -> None:
    for _ in range(3):
        results = run_ranks(add_up, 4, torch.ones(3, dtype=torch.float64), scale=2.0)
        assert [world for world, _ in results] == [4] * 4
        for _, total in results:
            torch.testing.assert_close(total, torch.full((3,), 20.0, dtype=torch.float64))


def test_a_rank_that_raises() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as info:
        run_ranks(raise_on_one, 4)
    assert time.monotonic() - start < 20
    assert info.value.first == 1
    text = str(info.value)
    assert text.endswith("ValueError: the cause")
    assert "raise_on_one" in text


def test_a_rank_that_hangs() -> None:
    with pytest.raises(RankError) as info:
        run_ranks(hang_on_one, 3, timeout=5)
    text = str(info.value)
    assert text.count("--- rank ") == 3
    assert "wait_for_godot" in text
    assert "barrier" in text
    assert info.value.first is None


def test_a_rank_that_is_killed() -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as info:
        run_ranks(die_on_one, 3)
    assert info.value.first == 1
