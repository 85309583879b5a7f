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


class Turns:
    """Seconds of what took turns, by name: of a rank's processor, the mean over ranks, and by the clock, the slowest
    rank's.
    """

    def __init__(self, steps: Mapping[str, Callable[[], object]], rounds: int) -> None:
        """All ranks of the job take part."""
        names = list(steps)
        own = np.zeros((2, len(names), rounds))
        for number in range(_WARM + rounds):
            for shift in range(len(names)):
                place = (number + shift) % len(names)
                dist.barrier()
                began = time.process_time(), time.perf_counter()
                steps[names[place]]()
                if number >= _WARM:
                    own[:, place, number - _WARM] = time.process_time() - began[0], time.perf_counter() - began[1]
        everywhere = [own] * dist.get_world_size()
        if len(everywhere) > 1:
            dist.all_gather_object(everywhere, own)
        stacked = np.stack(everywhere)
        self.processor: dict[str, Seconds] = dict(zip(names, stacked[:, 0].mean(0), strict=True))
        self.clock: dict[str, Seconds] = dict(zip(names, stacked[:, 1].max(0), strict=True))


def step_of(model: nn.Module, batch: Mapping[str, Any], **options: Any) -> Callable[[], None]:
    """A training step through the Booster."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **options))
    boosted: Any
    optimizer: Any
    boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))

    def step() -> None:
        booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _: loss_of(outputs), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def typical(seconds: Seconds) -> float:
    """The median over rounds; of a difference that comes out negative, 0."""
    return max(float(np.median(seconds)), 0.0)
