"""Where to cut a chain of layers so that the dearest rank of a pipeline is as cheap as possible.

A step takes as long as its dearest rank, which for several chunks is the sum over the rank's stages: two dear stages on
one rank are worse than one stage a little dearer. With one stage per rank the best cut follows from dynamic
programming. With several, all cuts are tried where they are few. Where they are many, the cut that is best for stages
is improved by moving units: shifting a run of successive cuts by one takes a unit from one stage and gives another one
to a stage further on, so that any stage can give to any other. Of all such moves, or pairs of moves, the best is made
until none helps. (Used in place of trying all on 1559 random chains of up to 12 units, this found the best in 97 %; of
the 500 with equal layers, as models have them, in all but one.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from math import comb

import numpy as np
from numpy.typing import NDArray

from ..planning.actions import Kind
from ..planning.placement import Placement
from ..planning.rank_memory import RankMemory, amounts
from ..planning.simulate import Costs
from .entry import ENTRY

_MAX_TRIED = 5000  # cuts of a chain
_MAX_NUMBERS = 4_000_000  # in one array of moves
_FORBIDDEN = 1e6  # times the cost of everything
_MAX_PAIRS = 100_000  # of moves that are tried together where no single one helps: up to 17 stages
Bounds = NDArray[np.int64]  # [..., stages + 1] units at which stages start and end, ENTRY where the first one does


@dataclass(frozen=True)
class ChainCosts:
    """What a stage of consecutive units costs, in any unit of time.

    forward     of every unit, and last of the tail, what lies behind the units; a backward takes twice as long
    head        part of the first unit's that is no layer (embeddings): like the tail it is never recomputed
    recomputed  share of a stage's layers that are run once more in the backward pass, its first ones; or their number
                by stage
    selective   the same of those behind them that are run once more without their products
    cheap       of every unit, the time of a forward without its products

    Head and tail count as two more units here: the first stage starts in front of the head, at ENTRY, and may consist
    of it alone; the last one ends behind the tail, and may consist of that alone.
    """

    forward: Sequence[float]
    head: float = 0.0
    recomputed: float | Sequence[int] = 0.0
    selective: float | Sequence[int] = 0.0
    cheap: Sequence[float] = ()

    def of(self, stages: Sequence[range]) -> NDArray[np.float64]:
        """Time of the stages with these units."""
        return self.stages(self._bounds(stages))

    def _bounds(self, stages: Sequence[range]) -> Bounds:
        return np.array([ENTRY, *(units.start for units in stages[1:]), len(self.forward)])

    def stages(self, bounds: Bounds) -> NDArray[np.float64]:
        """Time of all stages, [..., stages], for a microbatch forward and backward."""
        if bounds.size > (len(self.forward) + 2) ** 2 and not self.by_stage:
            return self._every[bounds[..., :-1] - ENTRY, bounds[..., 1:] - ENTRY]
        forward, again = self.parts(bounds)
        return 3 * forward + again

    @property
    def by_stage(self) -> bool:
        """Whether equal stages may recompute different numbers of layers."""
        return not (isinstance(self.recomputed, float | int) and isinstance(self.selective, float | int))

    @cached_property
    def _every(self) -> NDArray[np.float64]:
        """Time of every stage that there could be, [start, end] from ENTRY on."""
        low, high = np.meshgrid(*[np.arange(ENTRY, len(self.forward) + 1)] * 2, indexing="ij")
        forward, again = self.parts(np.stack([low, np.maximum(low, high)], axis=-1))
        found: NDArray[np.float64] = (3 * forward + again)[..., 0]
        return found

    def parts(self, bounds: Bounds) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Time of all stages' forwards, and of the forwards that their backwards repeat."""
        first_alone = self.forward[0] - self.head
        total = np.cumsum([0.0, self.head, first_alone, *self.forward[1:]])  # from ENTRY on
        alone = np.cumsum([0.0, first_alone, *self.forward[1:-1]])
        low, high = bounds[..., :-1] - ENTRY, bounds[..., 1:] - ENTRY
        layers = np.clip(bounds, 0, len(self.forward) - 1)
        first = layers[..., :-1]
        _, again, in_part = self.layers(bounds)
        repeated = alone[first + again] - alone[first]
        if self.cheap:
            cheap = np.cumsum([0.0, *self.cheap])
            second = first + again
            repeated = repeated + cheap[second + in_part] - cheap[second]
        return total[high] - total[low], repeated

    def layers(self, bounds: Bounds) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the stages' layers, [..., stages]: all, recomputed as a whole, and in part."""
        inside = np.clip(bounds, 0, len(self.forward) - 1)
        length = inside[..., 1:] - inside[..., :-1]
        again = _number(self.recomputed, length)
        return length, again, _number(self.selective, length, length - again)

    def layers_of(self, stages: Sequence[range]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """`layers` of the stages with these units."""
        return self.layers(self._bounds(stages))

    def of_actions(self, stages: Sequence[range]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`parts` of the stages with these units."""
        return self.parts(self._bounds(stages))

    def actions(self, stages: Sequence[range]) -> Costs:
        """What the actions of every stage cost, a forward 1 on average. A stage without any work costs a little all
        the same.
        """
        forward, again = self.of_actions(stages)
        mean = forward.mean() or 1.0
        forward = np.maximum(forward / mean, 1e-3)
        return Costs(forward.tolist(), (forward + again / mean).tolist(), forward.tolist())

    def measured(self, stages: Sequence[range], costs: Costs) -> list[float]:
        """Time of the head, of every unit and of the tail: of its stage's measured time the part that this estimate
        gives it.
        """
        table = costs.of_kind(len(stages))
        found = []
        for stage, (low, high) in enumerate(pairwise(self._bounds(stages).tolist())):
            estimated = self.stages(np.array([[unit, unit + 1] for unit in range(low, high)]))[:, 0]
            estimated = estimated if estimated.any() else np.ones(high - low)
            time = table[Kind.F][stage] + table[Kind.B][stage]
            found += (time * estimated / estimated.sum()).tolist()
        return found


def _number(
    chosen: float | Sequence[int], length: NDArray[np.int64], most: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """How many of the layers of every stage are chosen, `most` at most."""
    found = np.floor(chosen * length).astype(np.int64) if isinstance(chosen, float | int) else np.array(chosen)
    return np.minimum(found, length if most is None else most)


@dataclass(frozen=True)
class MemoryBound:
    """What activations, and what postponed weight gradients wait with, may take on a rank, in those of a layer
    (`rank_memory`).
    """

    memory: RankMemory
    limit: float

    def peak(self, costs: ChainCosts, bounds: Bounds) -> NDArray[np.float64]:
        """Of the fullest rank, [...]."""
        layers, whole, in_part = costs.layers(bounds)
        return self.memory.peaks(*amounts(layers, whole, in_part), layers).max(-1)

    def excess(self, costs: ChainCosts, bounds: Bounds) -> NDArray[np.float64]:
        return np.maximum(self.peak(costs, bounds) - self.limit * (1 + 1e-9), 0.0)


class NoCutError(Exception):
    """Every cut needs more memory than is allowed; `least` is what one of them needs."""

    def __init__(self, least: float) -> None:
        super().__init__(least)
        self.least = least


def by_rank(stages: NDArray[np.float64], placement: Placement) -> NDArray[np.float64]:
    """[..., stages] summed over the stages of every rank, [..., ranks]."""
    held = np.array([placement.stages_of(rank) for rank in range(placement.num_ranks)])
    return stages[..., held].sum(-1)


def balance(
    costs: ChainCosts, cuts: Sequence[int], placement: Placement, bound: MemoryBound | None = None
) -> list[range]:
    """Units of every stage, at least one each. `cuts` are the units before which a stage may start. `NoCutError` where
    none keeps `bound`.

    The tail is a stage of its own where this is allowed (a cut behind the last unit) and makes the dearest rank cheaper
    by 1 % or more: a stage without layers is a surprise that must be worth it. So is the head (a cut before the first
    unit), and both.
    """
    units = len(costs.forward) - 1
    found, least = None, np.inf
    for parted in (set[int](), {units}, {0}, {0, units}):
        allowed = [cut for cut in cuts if 0 < cut < units or cut in parted]
        if not parted <= set(cuts) or len(allowed) < placement.num_stages - 1:
            continue
        other = _cut(costs, allowed, placement, bound)
        if bound is not None and bound.excess(costs, other):
            least = min(least, float(bound.peak(costs, other)))
        elif found is None or _dearest(costs, other, placement) < 0.99 * _dearest(costs, found, placement):
            found = other
    if found is None:
        assert bound is not None, (cuts, placement)
        raise NoCutError(least)
    return [range(max(int(low), 0), min(int(high), units)) for low, high in pairwise(found)]


def _dearest(costs: ChainCosts, bounds: Bounds, placement: Placement) -> float:
    return float(by_rank(costs.stages(bounds), placement).max())


def _cut(costs: ChainCosts, cuts: Sequence[int], placement: Placement, bound: MemoryBound | None) -> Bounds:
    """The best cut; where none keeps the bound, the one that needs least memory."""
    units, stages = len(costs.forward), placement.num_stages
    places = np.array([ENTRY, *cuts, units])
    assert len(places) > stages, (places, placement)
    if placement.num_chunks == 1:
        best = places[_by_stage(costs, places, stages, bound)]
        if bound is not None and bound.excess(costs, best):
            best = places[_by_stage(costs, places, stages, bound, by_memory=True)]
    elif comb(len(cuts), stages - 1) <= _MAX_TRIED:
        every = np.array([(ENTRY, *chosen, units) for chosen in combinations(cuts, stages - 1)])
        best = every[_best(costs, every, placement, bound)]
    else:
        even = np.linspace(0, len(places) - 1, stages + 1).round().astype(np.int64)
        starts = [_by_stage(costs, places, stages), even]
        if bound is not None:
            nothing = replace(bound, limit=0.0)  # so that the memory decides
            emptier = np.array([_improved(costs, places, start, placement, nothing) for start in starts])
            least = emptier[_best(costs, places[emptier], placement, nothing)]
            if bound.excess(costs, places[least]):
                return places[least]
            starts.append(least)
        found = np.array([places[_improved(costs, places, start, placement, bound)] for start in starts])
        best = found[_best(costs, found, placement, bound)]
    return best


def _by_stage(
    costs: ChainCosts,
    places: NDArray[np.int64],
    num_stages: int,
    bound: MemoryBound | None = None,
    by_memory: bool = False,
) -> NDArray[np.int64]:
    """Indices into `places` that make the dearest stage cheapest, then the sum of squares; with `by_memory` the fullest
    one emptiest.

    With a bound, for one stage per rank, stages that exceed it are avoided if that is possible.
    """
    count = len(places)
    low, high = np.meshgrid(np.arange(count), np.arange(count), indexing="ij")
    # best[j]: (dearest stage, squares) of the stages so far, the last of which ends at places[j]
    dearest, squares = np.full(count, np.inf), np.full(count, np.inf)
    dearest[0] = squares[0] = 0.0
    came_from = []
    cost = _one_stage(costs, places, 0, low, high, bound, by_memory)
    for stage in range(num_stages):
        if bound is not None or costs.by_stage:
            cost = _one_stage(costs, places, stage, low, high, bound, by_memory)
        worst, together = np.maximum(dearest[:, None], cost), squares[:, None] + cost**2
        # lexicographic minimum over the starts of this stage
        limit = worst.min(0) * (1 + 1e-12)
        together = np.where(worst <= limit, together, np.inf)
        origin = together.argmin(0)
        came_from.append(origin)
        dearest, squares = worst[origin, np.arange(count)], together[origin, np.arange(count)]
    found = [count - 1]
    for origin in reversed(came_from):
        found.append(int(origin[found[-1]]))
    return np.array(found[::-1])


def _one_stage(
    costs: ChainCosts,
    places: NDArray[np.int64],
    stage: int,
    low: NDArray[np.int64],
    high: NDArray[np.int64],
    bound: MemoryBound | None,
    by_memory: bool,
) -> NDArray[np.float64]:
    """Cost of one stage from places[low] to places[high]; infinite where it would be empty, far above all others where
    it exceeds the bound."""
    bounds = np.stack([places[low], np.maximum(places[low], places[high])], axis=-1)
    recomputed, selective = (
        of if isinstance(of, float | int) else [of[stage]] for of in (costs.recomputed, costs.selective)
    )
    own = replace(costs, recomputed=recomputed, selective=selective)
    found = own.stages(bounds)[..., 0]
    if bound is not None:
        layers, whole, in_part = own.layers(bounds)
        peak = bound.memory.peak(bound.memory.placement.rank_of(stage), *amounts(layers, whole, in_part), layers)
        found = (
            peak
            if by_memory
            else np.where(peak <= bound.limit * (1 + 1e-9), found, found + _FORBIDDEN * (1 + sum(costs.forward)))
        )
    return np.where(low < high, found, np.inf)


def _improved(
    costs: ChainCosts,
    places: NDArray[np.int64],
    start: NDArray[np.int64],
    placement: Placement,
    bound: MemoryBound | None,
) -> NDArray[np.int64]:
    """`start` after the best moves."""
    moves, pairs = _moves(placement.num_stages)
    current = start
    while True:
        chosen = _moved(costs, places, current, moves, placement, bound)
        if pairs is not None and (chosen == current).all():
            chosen = _moved(costs, places, current, pairs, placement, bound)
        if (chosen == current).all():
            return current
        current = chosen


@lru_cache(maxsize=4)
def _moves(stages: int) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Shifts of runs of cuts by one, and all sums of two of them where these are few."""
    longest = max(1, min(stages, _MAX_NUMBERS // (2 * stages**2)))
    runs = [(first, last) for first in range(1, stages) for last in range(first, min(stages, first + longest))]
    moves = np.zeros((2 * len(runs), stages + 1), dtype=np.int64)
    for index, (first, last) in enumerate(runs):
        moves[2 * index, first : last + 1], moves[2 * index + 1, first : last + 1] = 1, -1
    if len(moves) ** 2 > _MAX_PAIRS:
        return moves, None
    both = (moves[:, None] + moves[None, :]).reshape(-1, stages + 1)
    _, first = np.unique(both @ 5 ** np.arange(stages, -1, -1), return_index=True)  # rows of -2 to 2 as numbers
    return moves, both[first]


def _moved(
    costs: ChainCosts,
    places: NDArray[np.int64],
    current: NDArray[np.int64],
    moves: NDArray[np.int64],
    placement: Placement,
    bound: MemoryBound | None,
) -> NDArray[np.int64]:
    """The best of what `moves` make of `current`, which is kept unless one is better."""
    tried = np.concatenate([current + moves, current[None]])
    tried = tried[(np.diff(tried) > 0).all(1)]
    return tried[_best(costs, places[tried], placement, bound)]


def _best(costs: ChainCosts, bounds: Bounds, placement: Placement, bound: MemoryBound | None) -> int:
    """Index of the bounds with the cheapest dearest rank; of these the most even ranks, then the most even stages. Last
    of equals.

    With a memory bound, first of all of those that exceed it least.
    """
    stages = costs.stages(bounds)
    ranks = by_rank(stages, placement)
    scale = stages.sum(-1).mean()
    left = np.arange(len(bounds))
    if bound is not None:
        left = _least(bound.excess(costs, bounds), left)
    left = _least(ranks.max(-1)[left] / scale, left)
    for times in (ranks, stages):
        left = _least((times[left] ** 2).sum(-1) / scale**2, left)
    return int(left[-1])


def _least(keys: NDArray[np.float64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of these indices those with the least key, rounding errors apart."""
    rounded = keys.round(10)
    return indices[rounded == rounded.min()]
