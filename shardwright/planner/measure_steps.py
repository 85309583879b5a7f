"""What steps of whole models take on CPU ranks, over what is predicted from a calibration without them.

    shares(make_model, calibration, measured)       measured: by ranks, what `steps` returns

One after the other in a loop, operators find their operands in the caches; in a step they fetch them, and memory that
the allocator has from the system. The host, too, was measured in a loop, on busy cores. Some steps tell how much longer
or shorter either takes, from one whose operators are large to one that keeps the host busy:

    measured = operators * (seconds of operators) + host * (seconds of the host) + (what is sent)

By the clock ranks wait for the slowest of them, whenever they meet:

    measured by the clock = waits * (what is told of a step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from ..lazy import LazyInitContext
from ..plugins import HybridParallelPlugin
from .calibration import Calibration, calibrated
from .measure import Size, rounds_of
from .measure_turns import Turns, step_of, typical
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


# of several widths, some of which were not measured: how far a table is off differs from one to the other
REFERENCES = (
    Reference(256, 32, 4),
    Reference(224, 128, 1),
    Reference(160, 64, 2),
    Reference(128, 128, 1),
    Reference(96, 64, 2),
    Reference(64, 16, 2),
)
WORDS = 1024
_SAMPLES = 4
_LEAST, _MOST = 0.25, 4.0  # times; beyond, it is the measurement that is wrong


class Steps(NamedTuple):
    """Seconds, by reference: of a rank's processor, the mean over ranks, and by the clock."""

    processor: Sequence[float]
    clock: Sequence[float]


def steps(model: MakeModel, size: Size) -> Steps:
    """This process must be a rank of a job."""
    every = {
        str(number): step_of(model(reference.width, WORDS), reference.batch(dist.get_rank()), **reference.options)
        for number, reference in enumerate(REFERENCES)
    }
    taken = Turns(every, rounds_of(size))
    return Steps(*([typical(times[name]) for name in every] for times in (taken.processor, taken.clock)))


def shares(model: MakeModel, found: Calibration, measured: Mapping[int, Steps]) -> dict[str, list[float]]:
    """`Calibration.whole`. This process must be in no process group."""
    return {str(world): _shares(model, found, world, taken) for world, taken in measured.items()}


def _shares(model: MakeModel, found: Calibration, world: int, measured: Steps) -> list[float]:
    """Of operators, of the host, and of waits."""
    every = [_Step(model, world, reference) for reference in REFERENCES]

    def told(operators: float, host: float) -> NDArray[np.float64]:
        """[steps, (processor, clock)]"""
        known = replace(found, whole={str(world): (operators, host, 1.0)})
        return np.array([step.seconds(known) for step in every])

    operators, host = _of_processor(lambda *times: told(*times)[:, 0], np.array(measured.processor))
    waits = float(np.median(np.array(measured.clock) / told(operators, host)[:, 1]))
    return [operators, host, min(max(waits, 1.0), _MOST)]


def _of_processor(told: Callable[[float, float], NDArray[Any]], taken: NDArray[Any]) -> tuple[float, float]:
    operators, host, all_of_it = told(1.0, 0.0), told(0.0, 1.0), told(1.0, 1.0)
    sent = operators + host - all_of_it
    terms = np.stack([operators - sent, host - sent], axis=1)
    terms, own = terms / taken[:, None], 1 - sent / taken  # each step counts as much
    times, _, rank, _ = np.linalg.lstsq(terms, own, rcond=1e-2)
    if rank == 2 and (times > _LEAST).all() and (times < _MOST).all():
        return float(times[0]), float(times[1])
    both = float((terms.sum(-1) @ own) / (terms.sum(-1) ** 2).sum())  # the two cannot be told apart
    both = min(max(both, _LEAST), _MOST)
    return both, both


class _Step:
    """Of a reference, on so many ranks."""

    def __init__(self, model: MakeModel, world: int, reference: Reference) -> None:
        job = Job(partial(_plugin, reference), partial(_lazy, model, reference), _adamw, reference.batch(0))
        self._world = world
        self._profiled = Profiled(job, shape_of(job, world), "cpu")

    def seconds(self, found: Calibration) -> tuple[float, float]:
        """Of a rank's processor, and by the clock."""
        machine = calibrated(found, "fp32", self._world)
        told = self._profiled.estimator(self._world, machine).estimate(simulated=False)
        return told.processor, told.seconds


def _plugin(reference: Reference, **changes: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"precision": "fp32", **reference.options, **changes})


def _lazy(model: MakeModel, reference: Reference) -> nn.Module:
    with LazyInitContext():
        return model(reference.width, WORDS)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())
