"""What steps of whole models take on CPU ranks, over what is predicted from a calibration without them.

    shares(make_model, calibration, measured)       measured: by ranks, what `seconds` returns

One after the other in a loop, operators find their operands in the caches; in a step they fetch them, and memory that
the allocator has from the system. The host, too, was measured in a loop, on busy cores. Some steps tell how much longer
or shorter either takes, from one whose operators are large to one that keeps the host busy:

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


class Reference(NamedTuple):
    """A model of `WORDS` words, and its batch of a rank."""

    width: int
    length: int
    microbatches: int

    @property
    def options(self) -> dict[str, Any]:
        return {"zero_stage": 1, "max_norm": 1.0, "num_microbatches": self.microbatches}

    def batch(self, begin: int) -> dict[str, torch.Tensor]:
        numbers = torch.Generator().manual_seed(begin)
        ids = torch.randint(0, WORDS, (_SAMPLES, self.length), generator=numbers)
        return {"input_ids": ids, "labels": ids}


REFERENCES = (Reference(256, 128, 1), Reference(256, 32, 4), Reference(128, 64, 2), Reference(64, 16, 2))
WORDS = 1024
_SAMPLES = 4
_LEAST, _MOST = 0.25, 4.0  # times; beyond, it is the measurement that is wrong


def seconds(model: MakeModel, rank: int, world: int, size: Size) -> list[float]:
    """By reference: of a rank's processor, for a step, the mean over the job, whose rank this process is."""
    own = [
        step_seconds(model(reference.width, WORDS), reference.batch(rank), size, **reference.options)
        for reference in REFERENCES
    ]
    everywhere = [own] * world
    dist.all_gather_object(everywhere, own)
    return [sum(each) / world for each in zip(*everywhere, strict=True)]


def shares(model: MakeModel, found: Calibration, measured: Mapping[int, Sequence[float]]) -> dict[str, list[float]]:
    """`Calibration.whole`. This process must be in no process group."""
    return {str(world): _shares(model, found, world, taken) for world, taken in measured.items()}


def _shares(model: MakeModel, found: Calibration, world: int, taken: Sequence[float]) -> list[float]:
    """Of operators and of the host."""
    steps = [_Step(model, world, reference) for reference in REFERENCES]

    def predicted(operators: float, host: float) -> Any:
        known = replace(found, whole={str(world): (operators, host)})
        return np.array([step.seconds(known) for step in steps])

    operators, host, all_of_it = predicted(1.0, 0.0), predicted(0.0, 1.0), predicted(1.0, 1.0)
    sent = operators + host - all_of_it
    terms = np.stack([operators - sent, host - sent], axis=1)
    terms, own = terms / np.array(taken)[:, None], 1 - sent / np.array(taken)  # each step counts as much
    times, _, rank, _ = np.linalg.lstsq(terms, own, rcond=1e-2)
    if rank == 2 and (times > _LEAST).all() and (times < _MOST).all():
        return [float(each) for each in times]
    both = float((terms.sum(-1) @ own) / (terms.sum(-1) ** 2).sum())  # the two cannot be told apart
    return [min(max(both, _LEAST), _MOST)] * 2


class _Step:
    """Of a reference, on so many ranks."""

    def __init__(self, model: MakeModel, world: int, reference: Reference) -> None:
        job = Job(partial(_plugin, reference), partial(_lazy, model, reference), _adamw, reference.batch(0))
        self._world = world
        self._profiled = Profiled(job, shape_of(job, world), "cpu")

    def seconds(self, found: Calibration) -> float:
        """Of a rank's processor."""
        machine = calibrated(found, "fp32", self._world)
        return self._profiled.estimator(self._world, machine).estimate(simulated=False).processor


def _plugin(reference: Reference, **changes: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"precision": "fp32", **reference.options, **changes})


def _lazy(model: MakeModel, reference: Reference) -> nn.Module:
    with LazyInitContext():
        return model(reference.width, WORDS)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())
