"""What test_every_argument walks with: kinds of entries, how they are checked, and a small run to look at.

Changes(see, plain, other)     `see(value)` differs between the two values
Refused(see, value, words)     a ValueError with these words
Said(see, value, words)        accepted, and a word in the log
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from shardwright import Booster
from shardwright.logging import get_dist_logger
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.base import Plugin

See = Callable[[Any], Any]


@dataclass(frozen=True)
class Changes:
    see: See
    plain: Any
    other: Any


@dataclass(frozen=True)
class Refused:
    see: See
    value: Any
    words: str


@dataclass(frozen=True)
class Said:
    see: See
    value: Any
    words: str


class Net(nn.Sequential):
    """Can leave its last layer out."""

    whole = True

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) if self.whole else self[0](inputs)


class Run:
    """A boosted model of two layers and all that goes with it."""

    def __init__(self, directory: Path, plugin: Plugin | None = None, steps: int = 0, **booster: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        plain = Net(nn.Linear(3, 4), nn.Linear(4, 1))
        self.raw = torch.optim.AdamW(plain.parameters(), lr=0.1)
        self.booster = Booster(plugin=plugin or HybridParallelPlugin(precision="fp32"), **booster)
        loader = DataLoader(TensorDataset(torch.arange(12.0).view(4, 3)), batch_size=1)
        self.model, self.optimizer, _, self.loader, self.scheduler = self.booster.boost(
            plain, self.raw, dataloader=loader, lr_scheduler=StepLR(self.raw, 1)
        )  # type: ignore[assignment]
        for _ in range(steps):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    optimizer: Any
    model: Any
    scheduler: Any

    def backward(self, **options: Any) -> None:
        self.booster.backward(self.loss(), self.optimizer, **options)

    def loss(self) -> torch.Tensor:
        return 100 * self.model(torch.ones(2, 3)).square().mean()  # type: ignore[no-any-return]

    def weights(self) -> float:
        return float(sum(param.detach().sum() for param in self.model.parameters()))

    def pipeline(self, **options: Any) -> Any:
        given = {
            "data_iter": batches(1.0),
            "model": self.model,
            "criterion": mean,
            "optimizer": self.optimizer,
            **options,
        }
        return self.booster.execute_pipeline(**given)

    def files(self, name: str) -> list[str]:
        self.booster.wait()
        root = self.directory / name
        return sorted(str(path.relative_to(self.directory)) for path in [root, *root.rglob("*")])


def traced(run: Run, **given: Any) -> Any:
    """Where the trace is, the steps that it has, and whether it tells of memory."""
    given = {"directory": run.directory / "traces", "steps": 1, "wait": 0, "warmup": 1, **given}
    with run.booster.profile(**given) as profile:
        for _ in range(3):
            torch.ones(2).add(1)
            profile.step()
    [path] = Path(given["directory"]).glob("rank0.json")
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    return path, sorted(name for name in names if name.startswith("ProfilerStep")), "[memory]" in names


def has_gradients(run: Run) -> bool:
    return any(param.grad is not None and bool(param.grad.any()) for param in run.model.parameters())


def batches(value: float) -> Iterator[torch.Tensor]:
    return iter([torch.full((2, 3), value)])


def mean(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return outputs.square().mean()


def twice(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return 2 * outputs.square().mean()


def check(entry: Any) -> None:
    if isinstance(entry, Changes):
        assert entry.see(entry.plain) != entry.see(entry.other)
    elif isinstance(entry, Refused):
        with pytest.raises(ValueError) as caught:
            entry.see(entry.value)
        assert entry.words in str(caught.value)
    else:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("shardwright").addHandler(handler)
        get_dist_logger().logger.addHandler(handler)
        try:
            entry.see(entry.value)
        finally:
            logging.getLogger("shardwright").removeHandler(handler)
            get_dist_logger().logger.removeHandler(handler)
        assert any(entry.words in message for message in said), said
