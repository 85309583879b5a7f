"""Steps of tiny models that take turns: what they differ by is small beside what the machine's speed changes by within
a minute, so that a difference is taken within a round, and the median of it over rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from ..booster import Booster
from ..models.example_inputs import loss_of
from ..plugins import HybridParallelPlugin

_WARM = 3  # rounds that do not count: in the first steps a loss is looked into

Seconds = NDArray[np.float64]  # [rounds]


def take_turns(
    steps: Mapping[str, Callable[[int], object]],
    rounds: int,
    warm_up: int,
    arrive: Callable[[], object],
    finish: Callable[[], object],
) -> dict[str, NDArray[np.float64]]:
    """Seconds of this process by name, [(clock, processor), rounds]. A round runs every step once, each time begun by
    another.

    steps   called with the number of the round, from 0 on, warm-up included
    arrive  before a step, which is not timed; `finish` behind it, which is
    """
    names = list(steps)
    found = {name: np.zeros((2, rounds)) for name in names}
    for number in range(warm_up + rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            arrive()
            began = time.perf_counter(), time.process_time()
            steps[name](number)
            finish()
            if number >= warm_up:
                found[name][:, number - warm_up] = time.perf_counter() - began[0], time.process_time() - began[1]
    return found


class Turns:
    """Seconds of what took turns, by name: of a rank's processor, the mean over ranks, and by the clock, the slowest
    rank's.
    """

    def __init__(self, steps: Mapping[str, Callable[[int], object]], rounds: int) -> None:
        """All ranks of the job take part."""
        own = take_turns(steps, rounds, _WARM, dist.barrier, lambda: None)
        everywhere = [own] * dist.get_world_size()
        if len(everywhere) > 1:
            dist.all_gather_object(everywhere, own)
        self.clock: dict[str, Seconds] = {name: np.max([each[name][0] for each in everywhere], 0) for name in own}
        self.processor: dict[str, Seconds] = {name: np.mean([each[name][1] for each in everywhere], 0) for name in own}


def step_of(model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Callable[[int], None]:
    """A training step through the Booster, for `take_turns`."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **options))
    boosted: Any
    optimizer: Any
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))

    def step(number: int) -> None:
        booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _: loss_of(outputs), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def typical(seconds: Seconds) -> float:
    """The median over rounds; of a difference that comes out negative, 0."""
    return max(float(np.median(seconds)), 0.0)
