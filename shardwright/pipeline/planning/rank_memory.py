"""What pipeline ranks hold at the peak of a step under one schedule, as a function of the cut.

In activations of a layer that keeps all of them, for a microbatch: a layer counts 1, `RECOMPUTED` where it is
recomputed, `SELECTIVE` where it is in part. All but what a stage has received and what selective layers keep besides
their inputs can wait in host memory. Inputs and output gradients of a layer's linears, with which deferred weight
gradients wait, are about as much as all that it keeps.

Of a schedule only this matters: of how many microbatches a rank holds the activations of each of its chunks, of how
many weight gradients wait, and of how many activations are away, at the same moment. Of these moments few can be the
peak of any cut, and those are kept.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..schedules import Schedule
from .actions import Kind
from .memory import Offloaded, memory_curves
from .simulate import simulate

RECOMPUTED = 1 / 16
SELECTIVE = 0.4
Array = NDArray[np.float64]


class Deferral(NamedTuple):
    """Of weight gradients, under schedules that postpone them.

    share  that can wait
    room   that may wait on a rank, in layers; None: what fits into the memory of 1F1B with as many layers as the rank
           has
    """

    share: float = 0.0
    room: float | None = None


def amounts(layers: NDArray[np.int64], whole: NDArray[np.int64], in_part: NDArray[np.int64]) -> tuple[Array, Array]:
    """What stages with so many layers keep of a microbatch, and what of it can leave."""
    kept = layers - whole * (1 - RECOMPUTED) - in_part * (1 - SELECTIVE)
    return kept, np.maximum(kept - in_part * (SELECTIVE - RECOMPUTED) - RECOMPUTED, 0.0)


class RankMemory:
    """Of the ranks of one schedule; `offloaded` is the share of every stage's activations that waits in host memory,
    `slices` what the schedule has in place of a microbatch, and amounts are then of slices."""

    def __init__(
        self,
        schedule: Schedule,
        deferral: Deferral | None = None,
        offloaded: Sequence[float] | None = None,
        slices: int = 1,
    ) -> None:
        self.placement = schedule.placement
        self.deferral = deferral
        self._deepest = min(
            max(action.microbatch for action in schedule.actions[0]) + 1, self.placement.num_ranks * slices
        )
        self._stages = np.array([self.placement.stages_of(rank) for rank in range(self.placement.num_ranks)])
        run, count = simulate(schedule).run, self.placement.num_stages
        columns: list[list[Array]] = [[] for _ in range(self.placement.num_ranks)]
        for chunk in range(self.placement.num_chunks):
            one = [float(self.placement.chunk_of(stage) == chunk) for stage in range(count)]
            for kept, away in ((one, [0.0] * count), ([0.0] * count, one)):
                leaving = Offloaded(offloaded, away) if offloaded is not None else None
                for rank, curve in enumerate(memory_curves(run, kept, kept if deferral is not None else None, leaving)):
                    columns[rank] += [curve.kept, curve.deferred]
        # [moments, chunks] of every rank: microbatches held, away, and waiting with weight gradients
        self._moments = [_largest(np.stack(found, -1)) for found in columns]

    def peaks(self, kept: Array, leaving: Array, layers: NDArray[np.int64]) -> Array:
        """[..., ranks] from what stages keep, what can leave, and their layers, [..., stages]."""
        found = [
            self.peak(rank, kept[..., own], leaving[..., own], layers[..., own])
            for rank, own in enumerate(self._stages)
        ]
        return np.stack(found, -1)

    def peak(self, rank: int, kept: Array, leaving: Array, layers: NDArray[np.int64]) -> Array:
        """Of one rank, [...], from its own stages, [..., chunks]."""
        moments = self._moments[rank]
        held = kept @ moments[:, 0::4].T + leaving @ moments[:, 2::4].T
        if self.deferral is not None:
            waiting = self.deferral.share * layers @ moments[:, 1::4].T
            most = self._deepest * kept.sum(-1)[..., None] - held
            room = np.maximum(most, 0.0) if self.deferral.room is None else self.deferral.room
            held = held + np.minimum(waiting, room)
        return held.max(-1)

    def late(self, schedule: Schedule, kept: Array, layers: NDArray[np.int64]) -> Array:
        """Share of the weight gradients of every stage that waits until its W, of those that can wait; the others are
        computed in I when the room is full, oldest first."""
        assert self.deferral is not None
        share = np.ones(len(kept))
        for rank, actions in enumerate(schedule.actions):
            own = self._stages[rank]
            if not self._is_full(rank, kept[own], layers[own]):
                continue
            most = self._deepest * kept[own].sum()
            held, total, waiting, oldest = 0.0, 0.0, dict[tuple[int, int], float](), deque[tuple[int, int]]()
            waited, count = dict.fromkeys(own.tolist(), 0.0), Counter[int]()
            for kind, stage, microbatch in actions:
                work = self.deferral.share * float(layers[stage])
                held += kept[stage] * ((kind in (Kind.F, Kind.FB)) - (kind in (Kind.I, Kind.B)))
                if kind is Kind.I:
                    waiting[stage, microbatch] = work
                    oldest.append((stage, microbatch))
                    total += work
                    room = max(most - held, 0.0) if self.deferral.room is None else self.deferral.room
                    while total > room + 1e-9:
                        early = min(total - room, waiting.get(oldest[0], 0.0))
                        total -= early
                        if early < waiting.get(oldest[0], 0.0):
                            waiting[oldest[0]] -= early
                        else:
                            waiting.pop(oldest.popleft(), None)
                elif kind is Kind.W:
                    left = waiting.pop((stage, microbatch), 0.0)
                    total -= left
                    waited[stage] += left / work if work else 1.0
                    count[stage] += 1
            for stage, number in count.items():
                share[stage] = waited[stage] / number
        return share

    def _is_full(self, rank: int, kept: Array, layers: NDArray[np.int64]) -> bool:
        """Whether a rank has no room at some moment for all that could wait."""
        assert self.deferral is not None
        moments = self._moments[rank]
        waiting = moments[:, 1::4] @ (self.deferral.share * layers)
        held = moments[:, 0::4] @ kept
        room = self._deepest * kept.sum() - held if self.deferral.room is None else self.deferral.room
        return bool(((waiting > room + 1e-9) & (waiting > 0)).any())


def _largest(moments: Array) -> Array:
    """Those of the rows that no other row has at least as much of everything as."""
    rows = np.unique(moments, axis=0)[::-1]
    kept = np.empty((0, rows.shape[1]))
    for row in rows:
        if not (kept >= row).all(-1).any():
            kept = np.concatenate([kept[~(kept <= row).all(-1)], row[None]])
    return kept
