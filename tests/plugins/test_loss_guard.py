"""A loss that is nan on one rank alone: all ranks leave the step out, or all raise, under every plugin."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.interface import LossGuard, NonFiniteLoss
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import run_ranks
from shardwright.utils.tensors import local_tensor

PLUGINS: dict[str, Any] = {
    "ddp": lambda: {"plugin": TorchDDPPlugin()},
    "ddp, fp16": lambda: {"plugin": TorchDDPPlugin(), "mixed_precision": "fp16"},
    "fsdp": lambda: {"plugin": TorchFSDPPlugin()},
    "zero 1": lambda: {"plugin": LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=1.0)},
    "zero 2, fp16": lambda: {"plugin": LowLevelZeroPlugin(stage=2, precision="fp16", initial_scale=8)},
    "zero 3": lambda: {"plugin": LowLevelZeroPlugin(stage=3, precision="fp32")},
    "hybrid": lambda: {"plugin": HybridParallelPlugin(precision="fp32")},
}


def train(rank: int, kind: str, on_nan: str, factors: list[float]) -> tuple[list[torch.Tensor], str]:
    """A step per factor, which multiplies rank 1's loss; the weights at the end, and what was raised."""
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    booster = Booster(**PLUGINS[kind](), on_nan=on_nan)
    model, optimizer, *_ = booster.boost(model, optimizer)
    error = ""
    for number, factor in enumerate(factors):
        inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * number + rank))
        loss = model(inputs).float().square().mean()
        booster.backward(loss * (factor if rank else 1.0), optimizer)
        try:
            optimizer.step()
        except NonFiniteLoss as raised:
            error = str(raised)
        optimizer.zero_grad()
    return [local_tensor(param.detach()).clone() for param in model.unwrap().parameters()], error


def compare(rank: int, world: int) -> None:
    for kind in PLUGINS:
        straight, _ = train(rank, kind, "skip", [1.0])
        for bad in (math.nan, math.inf):
            skipped, _ = train(rank, kind, "skip", [1.0, bad])
            stopped, error = train(rank, kind, "stop", [1.0, bad])
            assert "step 2 is not finite" in error, kind
            for left_out, kept, expected in zip(skipped, stopped, straight, strict=True):
                assert torch.equal(left_out, expected), kind
                assert torch.equal(kept, expected), kind
        for watched, plain in zip(
            train(rank, kind, "skip", [1.0, 1.0])[0], train(rank, kind, "warn", [1.0, 1.0])[0], strict=True
        ):
            assert torch.equal(watched, plain), f"{kind}: looking at the norm changed a good step"


def test_all_ranks_decide_alike() -> None:
    run_ranks(compare, 2, debug="INFO", timeout=110)


class _Later:
    """An event of a device that is late."""

    ready = False

    def query(self) -> bool:
        return self.ready


def test_what_waits_for_a_device_outlives_cleared_gradients() -> None:
    """And a batch whose gradients were cleared before a step is held against none."""
    guard, later, told = LossGuard("warn"), _Later(), list[str]()
    guard._travelling = "step 0", torch.tensor(1.0), later
    guard._say = lambda message, ranks=None: told.append(message)  # type: ignore[method-assign]
    guard.note(torch.tensor(math.nan))
    guard.withholds(None)
    guard.drop()
    assert told == []
    later.ready = True
    guard.note(torch.tensor(1.0))
    guard.withholds(None)
    assert ["the loss of steps 1 to 2 is nan" in message for message in told] == [True]
    guard.note(torch.tensor(math.nan))
    guard.drop()
    guard.note(torch.tensor(1.0))
    guard.withholds(None)
    assert len(told) == 1


def test_steps_are_named_as_the_run_counts_them(tmp_path: Path) -> None:
    """Also by a process that has gone on from a checkpoint."""
    booster, model = Booster(device="cpu", on_nan="stop"), nn.Linear(4, 4)
    wrapped, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.save(tmp_path / "step-7", wrapped, optimizer, step=7)
    booster.load(tmp_path, wrapped, optimizer)
    for factor in (1.0, math.nan):
        booster.backward(wrapped(torch.ones(2, 4)).sum() * factor, optimizer)
        if factor == 1.0:
            optimizer.step()
    with pytest.raises(NonFiniteLoss, match=r"the loss of step 9 is not finite, .*: the weights are those of step 8"):
        optimizer.step()
