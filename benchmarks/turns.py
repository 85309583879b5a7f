"""Steps that take turns in one run, so that what else the machine does hits all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright import Booster
from shardwright.planner.measure_turns import take_turns

Batch = dict[str, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


def boosted(model: nn.Module, plugin: Any, rate: float = 1e-3) -> Step:
    """A training step of a model through the Booster: loss, backward, AdamW."""
    booster = Booster(plugin=plugin)
    trained: Any
    trained, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=rate, fused=True))
    assert optimizer is not None

    def step(batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = trained(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Turns:
    """Wall and CPU seconds of each round, by name.

    A round runs every step once, each time begun by another; ratios are of one round, so that they are free of what
    changes between rounds. On several ranks a step's wall time is the slowest rank's, its CPU time that of all.
    """

    def __init__(self, wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
        self.wall, self.cpu = wall, cpu

    @classmethod
    def take(cls, steps: Mapping[str, Callable[[int], object]], rounds: int, *, warm_up: int = 0) -> Turns:
        """steps    by name; called with the number of the round, from 0 on, warm-up included"""
        own = take_turns(steps, rounds, warm_up, _arrive, _synchronize)
        wall, cpu = ({name: times[kind].tolist() for name, times in own.items()} for kind in (0, 1))
        return cls(*_over_ranks(wall, cpu))

    def summary(self, base: str) -> dict[str, dict[str, float]]:
        """By name: medians in milliseconds, medians of the ratios to `base` in the same round."""
        return {
            name: {
                "wall ms": round(1e3 * median(self.wall[name]), 2),
                "CPU ms": round(1e3 * median(self.cpu[name]), 2),
                "wall ratio": round(median(self.ratios("wall", name, base)), 4),
                "CPU ratio": round(median(self.ratios("cpu", name, base)), 4),
            }
            for name in self.wall
        }

    def ratios(self, kind: str, name: str, base: str) -> list[float]:
        times = getattr(self, kind)
        return [one / other for one, other in zip(times[name], times[base], strict=True)]


def _arrive() -> None:
    _synchronize()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _over_ranks(wall: dict[str, list[float]], cpu: dict[str, list[float]]) -> tuple[dict[str, list[float]], ...]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return wall, cpu
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    for times, operation in ((wall, dist.ReduceOp.MAX), (cpu, dist.ReduceOp.SUM)):
        table = torch.tensor([times[name] for name in times], dtype=torch.float64, device=device)
        dist.all_reduce(table, operation)
        found.append(dict(zip(times, table.tolist(), strict=True)))
    return tuple(found)
