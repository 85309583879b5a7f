"""What steps of whole models take on CPU ranks, over what is predicted from a calibration without them.

    shares(make_model, calibration, measured)       measured: by ranks, what `seconds` returns

One after the other in a loop, operators find their operands in the caches; in a step they fetch them, and memory that
the allocator has from the system. The host, too, was measured in a loop, on busy cores. Two models tell how much longer
or shorter either takes: one whose operators are large, and one that keeps the host busy.

    measured = operators * (seconds of operators) + host * (seconds of the host) + (what is sent)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..lazy import LazyInitContext
from ..plugins import HybridParallelPlugin
from .calibration import Calibration, calibrated
from .measure import Size, step_seconds
from .replay import Job
from .step_times import Profiled, shape_of

MakeModel = Callable[[int, int], nn.Module]  # of a width, and so many words


class _Reference(NamedTuple):
    """A model, and its batch of a rank."""

    width: int
    length: int


_REFERENCES = (_Reference(256, 128), _Reference(64, 16))
_SAMPLES, _WORDS = 4, 1024
_OPTIONS: dict[str, Any] = {"zero_stage": 1, "num_microbatches": 2}
_LEAST, _MOST = 0.25, 4.0  # times; beyond, it is the measurement that is wrong


def seconds(model: MakeModel, rank: int, world: int, size: Size) -> list[float]:
    """By reference: of a rank's processor, for a step without the optimizer's, the mean over the job, whose rank this
    process is.
    """
    own = [
        step_seconds(model(reference.width, _WORDS), _batch(reference, rank), size, **_OPTIONS)
        for reference in _REFERENCES
    ]
    everywhere = [own] * world
    dist.all_gather_object(everywhere, own)
    return [sum(each) / world for each in zip(*everywhere, strict=True)]


def shares(model: MakeModel, found: Calibration, measured: Mapping[int, Sequence[float]]) -> dict[str, list[float]]:
    """`Calibration.whole`. This process must be in no process group."""
    return {str(world): _shares(model, found, world, taken) for world, taken in measured.items()}


def _shares(model: MakeModel, found: Calibration, world: int, taken: Sequence[float]) -> list[float]:
    """Of operators and of the host."""
    steps = [_Step(model, world, reference) for reference in _REFERENCES]

    def predicted(operators: float, host: float) -> Any:
        known = replace(found, whole={str(world): (operators, host)})
        return np.array([step.seconds(known) for step in steps])

    sent = predicted(0.0, 0.0)
    terms = np.stack([predicted(1.0, 0.0) - sent, predicted(0.0, 1.0) - sent], axis=1)
    own = np.array(taken) - sent
    if abs(np.linalg.det(terms)) > 1e-3 * np.abs(terms).max() ** 2:
        times = np.linalg.solve(terms, own)
        if (times > _LEAST).all() and (times < _MOST).all():
            return [float(each) for each in times]
    both = float(own.sum() / terms.sum())  # what the two models do cannot be told apart
    return [min(max(both, _LEAST), _MOST)] * 2


class _Step:
    """Of a reference, on so many ranks."""

    def __init__(self, model: MakeModel, world: int, reference: _Reference) -> None:
        job = Job(_plugin, partial(_lazy, model, reference), _adamw, _batch(reference, 0))
        self._world = world
        self._profiled = Profiled(job, shape_of(job, world), "cpu")

    def seconds(self, found: Calibration) -> float:
        """Of a rank's processor, without the optimizer's."""
        machine = calibrated(found, "fp32", self._world)
        estimate = self._profiled.estimator(self._world, machine).estimate(simulated=False)
        return estimate.processor - estimate.parts["optimizer"]


def _plugin(**changes: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"precision": "fp32", **_OPTIONS, **changes})


def _lazy(model: MakeModel, reference: _Reference) -> nn.Module:
    with LazyInitContext():
        return model(reference.width, _WORDS)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _batch(reference: _Reference, begin: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(begin)
    ids = torch.randint(0, _WORDS, (_SAMPLES, reference.length), generator=numbers)
    return {"input_ids": ids, "labels": ids}
