"""Small jobs that fail on one rank, for tests and for the table of mistakes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardwright
from shardwright.booster import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import zoo

NAME = "llama-causal-lm"


def join(rank: int, world: int, timeout: float = 30) -> None:
    """Be a job that fails together: what `launch_from_torch` does in a script."""
    shardwright.launch(rank, world, None, None, seed=1, timeout=timeout)


class Training:
    """A tiny Llama under SGD, laid out as asked; `criterion(outputs, batch)` may be replaced between steps."""

    def __init__(self, **layout: Any) -> None:
        self.booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **layout))
        model = zoo.build(NAME, num_hidden_layers=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        self.criterion: Any = lambda outputs, _: outputs.loss

    def run(self, batch: Any) -> float | None:
        """One step of execute_pipeline and the optimizer; the loss on ranks that have it."""
        result = self.booster.execute_pipeline(iter([batch]), self.model, self.criterion, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None if result["loss"] is None else float(result["loss"])

    def run_plain(self, batch: Any) -> float:
        loss = self.model(**batch).loss
        self.booster.backward(loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def batch_of(seed: int, size: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = zoo.inputs(NAME, batch_size=size, seed=seed, **options)
    return batch


def one_process(seeds: list[int]) -> list[float]:
    """Losses of plain transformers and torch on the same batches."""
    model: nn.Module = zoo.build(NAME, num_hidden_layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for seed in seeds:
        loss = model(**batch_of(seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
