"""A model small enough to be saved hundreds of times, on this process alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwright import Booster
from shardwright.files import disk


class Toy:
    """Model, optimizer and scheduler, boosted without a plugin; weights tell the step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.booster = Booster(device="cpu")
        module = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        self.lrs: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.model, self.optimizer, *_ = self.booster.boost(module, optimizer, lr_scheduler=self.lrs)
        self.steps = 0

    def train(self, step: int) -> None:
        """Up to `step`; the numbers are the same on every run."""
        while self.steps < step:
            self.steps += 1
            generator = torch.Generator().manual_seed(self.steps)
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3, generator=generator)).square().sum().backward()
            self.optimizer.step()
            self.lrs.step()

    def save(self, path: Path, **settings: Any) -> None:
        self.booster.save(
            path, model=self.model, optimizer=self.optimizer, lr_scheduler=self.lrs, step=self.steps, **settings
        )

    def load(self, path: Path) -> dict[str, Any]:
        state = self.booster.load(path, model=self.model, optimizer=self.optimizer, lr_scheduler=self.lrs)
        self.steps = state["step"]
        return state

    def values(self) -> list[torch.Tensor]:
        moments = [state[key] for state in self.optimizer.state.values() for key in sorted(state)]
        return [tensor.clone() for tensor in [*self.model.state_dict().values(), *moments]]


def trained(step: int) -> Toy:
    toy = Toy()
    toy.train(step)
    return toy


def check_resumed(path: Path, steps: tuple[int, ...]) -> dict[str, Any]:
    """Load from `path` into a fresh toy; it must be exactly as after one of `steps`."""
    toy = Toy()
    state = toy.load(path)
    assert state["step"] in steps, state
    for mine, wanted in zip(toy.values(), trained(state["step"]).values(), strict=True):
        assert torch.equal(mine, wanted)
    return state


def operations(save: Callable[[], object]) -> list[str]:
    """Every operation on the disk of one save, in order."""
    seen: list[str] = []
    disk.set_probe(lambda operation, path: seen.append(f"{operation} {path.name}"))
    try:
        save()
    finally:
        disk.set_probe(None)
    return seen


def killed_at(number: int, save: Callable[[], object]) -> None:
    """Run `save` in a child process that kills itself at its `number`-th operation."""
    child = os.fork()
    if child == 0:
        left = number

        def probe(operation: str, path: Path) -> None:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

        disk.set_probe(probe)
        try:
            save()
        finally:
            os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"the save ended before operation {number}"
    assert os.WTERMSIG(status) == signal.SIGKILL
