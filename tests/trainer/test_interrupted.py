"""What signals find a trainer at: an evaluation, which may be longer than the grace, and the save that an earlier one
has asked for.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright
from shardwright.booster import Booster
from shardwright.checkpoint.directory import candidates
from shardwright.files import disk
from shardwright.plugins import HybridParallelPlugin
from shardwright.trainer import Every, Trainer

STEPS, STOP = 8, 4


@pytest.fixture(autouse=True)
def alone(no_launcher: None) -> None:
    shardwright.launch_from_torch(seed=1)


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Told:
    """A listener; `events` are "step 1", "evaluated 2"."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.losses: list[float] = []

    def step(self, metrics: dict[str, Any]) -> None:
        self.events.append(f"step {metrics['step']}")

    def evaluated(self, metrics: dict[str, Any]) -> None:
        self.events.append(f"evaluated {metrics['step']}")
        self.losses.append(metrics["eval_loss"])

    def started(self, facts: Any) -> None: ...

    finished = started


class Squares(Trainer):
    """Gets SIGTERM in the second batch of an evaluation, the one behind step `stop`."""

    stop = 0
    evaluated_batches = 0

    def criterion(self, outputs: Any, inputs: Any) -> torch.Tensor:
        if not self.model.training and self.progress.step == self.stop:
            self.evaluated_batches += 1
            if self.evaluated_batches == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        loss: torch.Tensor = outputs.square().mean()
        return loss

    def count_tokens(self, batch: Any) -> int:
        return len(batch["x"])


def train(directory: Path, stop: int = 0, resume: bool = False) -> tuple[Squares, Told]:
    torch.manual_seed(0)
    model: Any = Layer(4, 2)
    samples = [{"x": torch.randn(4) + 1} for _ in range(16)]
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    loaders = [
        booster.plugin.prepare_dataloader(samples, batch_size=4, shuffle=shuffle)  # type: ignore[union-attr]
        for shuffle in (True, False)
    ]
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, _, data, _ = booster.boost(model, optimizer, None, loaders[0])
    told: Any = Told()
    trainer = Squares(
        booster,
        model,
        optimizer,
        data,
        total_steps=STEPS,
        directory=directory,
        evaluation=loaders[1],
        evaluate=Every(steps=2),
        listeners=[told],
    )
    trainer.stop = stop
    assert trainer.resume() or not resume
    trainer.train()
    return trainer, told


def test_an_evaluation_is_left_for_the_run_that_goes_on(tmp_path: Path) -> None:
    straight, expected = train(tmp_path / "straight")
    assert not straight.interrupted
    trainer, told = train(tmp_path / "stopped", STOP)
    assert trainer.interrupted
    assert trainer.evaluated_batches == 2
    again, rest = train(tmp_path / "stopped", resume=True)
    assert not again.interrupted
    assert told.events + rest.events == expected.events
    assert told.losses + rest.losses == expected.losses
    assert rest.events[0] == f"evaluated {STOP}"


def test_a_second_signal_does_not_end_the_save(tmp_path: Path) -> None:
    def hit(operation: str, path: Path) -> None:
        if operation == "half-way write":
            os.kill(os.getpid(), signal.SIGTERM)

    disk.set_probe(hit)
    trainer, _ = train(tmp_path, STOP)
    assert trainer.interrupted
    (saved,), _ = candidates(tmp_path / "checkpoints")
    assert saved.step == STOP
