"""How long a step takes on two ranks, beside one process."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...models.dry_run import call_model
from ..train import adamw
from .axes import AXES, Axis
from .side import Side, cast, trained
from .subject import Built
from .train import Result

LAYOUTS = ("tp2", "pp2")
_WARM, _MEASURED = 2, 5  # steps


def times(built: Built, axis: Axis) -> Result:
    """Milliseconds of a step in single precision, of one process and of each layout: CPU time of the rank that has the
    most of it, which others on the machine do not change much, and elapsed time. A layout that is refused has none.
    """
    model, batch = built.model.float(), cast(built.batch, torch.float32)
    found = {"one": _together(_plain_step(model, built, batch) if dist.get_rank() == 0 else None)}
    for name in LAYOUTS:
        side = Side(AXES[name], copy.deepcopy(model), built)
        try:
            side.boost()
        except ValueError:
            side.optimizer = None
        if _all(side.optimizer is not None):
            found[name] = _together(_side_step(side, batch))
    return {"outcome": "timed", "times": found}


def _plain_step(model: nn.Module, built: Built, batch: dict[str, Any]) -> Callable[[], None]:
    plain: Any = copy.deepcopy(model)
    optimizer = adamw(trained(plain))

    def step() -> None:
        optimizer.zero_grad()
        torch.manual_seed(7)
        built.criterion(call_model(plain, batch)).backward()
        optimizer.step()

    return step


def _side_step(side: Side, batch: dict[str, Any]) -> Callable[[], None]:
    def step() -> None:
        side.optimizer.zero_grad()
        side.backward(batch)
        side.optimizer.step()

    return step


def _together(step: Callable[[], None] | None) -> list[float]:
    """[CPU, elapsed], the largest of all ranks' medians; a rank without a step waits for the others."""
    mine = [0.0, 0.0] if step is None else _medians(step)
    everywhere: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    return [round(max(column), 2) for column in zip(*everywhere, strict=True)]


def _medians(step: Callable[[], None]) -> list[float]:
    spent: list[tuple[float, float]] = []
    for _ in range(_WARM + _MEASURED):
        started = time.process_time(), time.perf_counter()
        step()
        spent.append((1e3 * (time.process_time() - started[0]), 1e3 * (time.perf_counter() - started[1])))
    return [statistics.median(column) for column in zip(*spent[_WARM:], strict=True)]


def _all(said: bool) -> bool:
    everywhere: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everywhere, said)
    return all(everywhere)
