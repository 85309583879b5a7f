"""What a rank holds over the time of a step, in bytes or any other unit.

A schedule bounds how many microbatches are under way; how much that is depends on what a stage keeps of each:

    kept      from F to B, or to I: activations; with recomputation little more than the inputs of layers, with
              selective recomputation also the outputs of their products and attention
    deferred  from I to W: inputs x and output gradients dy of every linear whose weight gradient waits. Recomputation
              does not make these any less, so that a zero-bubble schedule may hold more than 1F1B although it has no
              more microbatches under way
    leaving   part of what is kept that is in host memory for a while, of the microbatches that `offload_places` chooses
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .actions import KINDS, Kind
from .offload_places import find_leaving
from .simulate import Run

_F, _B, _I, _W, _FB = (KINDS.index(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.FB))


class Offloaded(NamedTuple):
    """By stage: the share of microbatches that leave, and what of one microbatch does."""

    shares: Sequence[float]
    leaving: Sequence[float]


class MemoryCurve(NamedTuple):
    """From `times[i]` on, the start of a forward or the end of another action, a rank holds `kept[i]` and
    `deferred[i]`, and `host[i]` in host memory."""

    times: NDArray[np.float64]
    kept: NDArray[np.float64]
    deferred: NDArray[np.float64]
    host: NDArray[np.float64]

    @property
    def peak(self) -> float:
        return float((self.kept + self.deferred).max(initial=0.0))


def memory_curves(
    run: Run, kept: Sequence[float], deferred: Sequence[float] | None = None, offloaded: Offloaded | None = None
) -> list[MemoryCurve]:
    """The curve of every rank; `kept` and `deferred` are those of one microbatch on each stage. Without `deferred` W
    frees nothing.
    """
    of_kept = np.array(kept, dtype=float)
    of_deferred = np.array(deferred, dtype=float) if deferred is not None else np.zeros(len(kept))
    curves = []
    for rank in range(run.placement.num_ranks):
        here = run.of(rank)
        kinds, stages = run.actions.kinds[here], run.actions.stages[here]
        forward, last = (kinds == _F) | (kinds == _FB), (kinds == _B) | (kinds == _I)
        times = np.where(forward, run.start[here], run.end[here])
        held = np.where(forward, of_kept[stages], 0.0) - np.where(last, of_kept[stages], 0.0)
        waiting = np.where(kinds == _I, of_deferred[stages], 0.0) - np.where(kinds == _W, of_deferred[stages], 0.0)
        host = np.zeros(len(times))
        if offloaded is not None:
            leaving, end = find_leaving(run.actions[here], offloaded.shares), run.end[here]
            amount = np.array(offloaded.leaving, dtype=float)[stages[leaving.forward]]
            none = np.zeros(len(amount))
            # Behind an action's own change of what is held: of F the start of a copy, of the next the end of it; of the
            # one before the last in front of B the start of the copy back.
            places = np.concatenate([np.arange(len(times)), leaving.behind, leaving.gone, leaving.called])
            order = np.argsort(places, kind="stable")
            times = np.concatenate([times, end[leaving.behind], end[leaving.gone], end[leaving.called]])[order]
            held = np.concatenate([held, none, -amount, amount])[order]
            waiting = np.concatenate([waiting, none, none, none])[order]
            host = np.concatenate([host, amount, none, -amount])[order]
        curves.append(MemoryCurve(times, np.cumsum(held), np.cumsum(waiting), np.cumsum(host)))
    return curves
