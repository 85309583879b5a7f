"""What a rank holds over the time of a step, in bytes or any other unit.

A schedule bounds how many microbatches are under way; how much that is depends on what a stage keeps of each:

    kept      from F to B, or to I: activations; with recomputation little more than the inputs of layers
    deferred  from I to W: inputs x and output gradients dy of every linear whose weight gradient waits. Recomputation does not make
              these any less, so that a zero-bubble schedule may hold more than 1F1B although it has no more microbatches under way
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .actions import KINDS, Kind
from .simulate import Run

_F, _B, _I, _W = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))


class MemoryCurve(NamedTuple):
    """From `times[i]` on, the start of a forward or the end of another action, a rank holds `kept[i]` and `deferred[i]`."""

    times: NDArray[np.float64]
    kept: NDArray[np.float64]
    deferred: NDArray[np.float64]

    @property
    def peak(self) -> float:
        return float((self.kept + self.deferred).max(initial=0.0))


def memory_curves(run: Run, kept: Sequence[float], deferred: Sequence[float] | None = None) -> list[MemoryCurve]:
    """The curve of every rank; `kept` and `deferred` are those of one microbatch on each stage. Without `deferred` W frees nothing."""
    of_kept = np.array(kept, dtype=float)
    of_deferred = np.array(deferred, dtype=float) if deferred is not None else np.zeros(len(kept))
    curves = []
    for rank in range(run.placement.num_ranks):
        here = run.of(rank)
        kinds, stages = run.actions.kinds[here], run.actions.stages[here]
        forward, last = kinds == _F, (kinds == _B) | (kinds == _I)
        times = np.where(forward, run.start[here], run.end[here])
        held = np.cumsum(np.where(forward, of_kept[stages], 0.0) - np.where(last, of_kept[stages], 0.0))
        waiting = np.cumsum(np.where(kinds == _I, of_deferred[stages], 0.0) - np.where(kinds == _W, of_deferred[stages], 0.0))
        curves.append(MemoryCurve(times, held, waiting))
    return curves
