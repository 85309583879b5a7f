"""Optimizers that go away while their gradients are on the way: the process group stays usable, and the memory comes
back.
"""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwright
from shardwright import Booster
from shardwright.comm.handle import count_orphans
from shardwright.plugins import LowLevelZeroPlugin
from shardwright.testing import run_ranks

WIDTH = 512  # a message of one megabyte, which is not sent at once


def drop_in_mid_step(rank: int, world: int, stage: int) -> None:
    for number in range(4):
        torch.manual_seed(number)
        model: nn.Module = nn.Linear(WIDTH, WIDTH, bias=False)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32"))
        model, optim, *_ = booster.boost(model, optim)
        x = torch.randn(3, WIDTH) + rank
        booster.backward(model(x).square().sum(), optim)  # the ranks wait for each other in their first step
        optim.zero_grad()
        time.sleep(0.2 * rank)  # the others have sent long before this rank receives
        booster.backward(model(x).square().sum(), optim)
        del model, optim, booster
        gc.collect()
        total = torch.full((4,), float(rank))
        dist.all_reduce(total)
        assert total.eq(world * (world - 1) / 2).all()
        assert count_orphans() == 1, "boost waits for those of the optimizer before"


def test_dropping_an_optimizer_in_mid_step_leaves_the_group_usable() -> None:
    for stage in (1, 2):
        run_ranks(drop_in_mid_step, 4, stage, timeout=60)


def recover_in_mid_step(rank: int, world: int) -> None:
    shardwright.launch(rank, world, None, None, timeout=20)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    for number in range(2):
        model: nn.Module = nn.Linear(WIDTH, WIDTH, bias=False)
        model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(3, WIDTH) + rank
        for _ in range(2 - number):  # the ranks wait for each other in the first step
            optim.zero_grad()
            booster.backward(model(x).square().sum(), optim)
        if number == 0:
            try:
                raise ValueError("between backward and step")
            except ValueError:
                shardwright.recover(timeout=20)
            optim.zero_grad()
            assert count_orphans() == 0, "messages over the connections before are nothing to wait for"
    optim.step()


def test_messages_of_a_failed_step_end_with_its_connections() -> None:
    run_ranks(recover_in_mid_step, 2, debug="OFF", timeout=60)


def join_again_in_mid_step(rank: int, world: int, store: str) -> None:
    for number in range(2):
        shardwright.launch(rank, world, None, None, timeout=20)
        model: nn.Module = nn.Linear(WIDTH, WIDTH, bias=False)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
        model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        booster.backward(model(torch.randn(3, WIDTH) + rank).square().sum(), optim)
        if number == 0:
            del model, optim, booster
            gc.collect()
            assert count_orphans() == 1
            dist.destroy_process_group()
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    optim.step()


def test_messages_end_with_their_process_group(tmp_path: Path) -> None:
    run_ranks(join_again_in_mid_step, 2, str(tmp_path / "store"), debug="OFF", timeout=60)
