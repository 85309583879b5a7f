"""What the watch over other ranks costs: messages to the store by the clock, none by the step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwright
from shardwright import Booster
from shardwright.cluster.job import POLL, Job
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.testing import run_ranks

STEPS = 300


def noting(send: Callable[..., Any], sent: list[str]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        sent.append(threading.current_thread().name)
        return send(*args)

    return noted


def count_messages(rank: int, world: int, hybrid: bool) -> None:
    shardwright.launch(rank, world, None, None)
    plugin: Any = HybridParallelPlugin(precision="fp32") if hybrid else LowLevelZeroPlugin(stage=1, precision="fp32")
    booster = Booster(plugin=plugin)
    model: nn.Module = nn.Linear(8, 8)
    model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(4, 8) + rank
    sent: list[str] = []
    for name in ("tell", "ask"):
        setattr(Job, name, noting(getattr(Job, name), sent))

    def step() -> None:
        optim.zero_grad()
        booster.backward(model(batch).square().mean(), optim)
        optim.step()

    step()  # ranks compare their batches in the first
    sent.clear()
    started = time.monotonic()
    for _ in range(STEPS):
        step()
    looks = (time.monotonic() - started) / (0.8 * POLL) + 2
    assert set(sent) <= {"shardwright-watch"}, "a step itself sends nothing"
    assert len(sent) <= 2 * looks, (
        f"{len(sent)} messages in {looks:.1f} looks: one to say that this rank lives, one to hear of failures"
    )


def test_messages_go_by_the_clock() -> None:
    for hybrid in (False, True):
        run_ranks(count_messages, 2, hybrid, debug="OFF", timeout=60)
