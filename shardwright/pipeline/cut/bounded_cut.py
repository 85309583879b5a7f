"""The cut for a schedule named by hand: time first, under a bound on what ranks hold where one is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .. import schedules
from ..planning.placement import Placement
from ..planning.rank_memory import Deferral, RankMemory
from ..planning.search import even_memory
from ..planning.sliced_schedule import get_sliced
from .activations import count_activations
from .balance import ChainCosts, MemoryBound, NoCutError
from .partition import partition_units
from .survey import Survey


@dataclass(frozen=True)
class BoundedCut:
    """How a schedule is cut.

    pp_style, num_microbatches  the schedule
    allowed    memory, over `even_memory`; None: any
    deferral   of weight gradients, under a style that postpones them
    offloaded  share of the activations of every stage that waits in host memory; None: none
    slices     of a microbatch along its sequence, each with its part of what a microbatch leaves
    """

    pp_style: str
    num_microbatches: int | None
    allowed: float | None
    deferral: Deferral
    offloaded: Sequence[float] | None
    slices: int = 1

    def partition(
        self, survey: Survey, costs_of: Callable[[Placement], ChainCosts], placement: Placement, pairs: bool
    ) -> list[range]:
        """Units of every stage. ValueError where no cut holds as little as is allowed."""
        costs = costs_of(placement)
        if self.allowed is None:
            return partition_units(survey, costs, placement)
        count = self.num_microbatches
        assert count is not None
        schedule = get_sliced(self.pp_style, placement.num_ranks, count, self.slices, placement.num_chunks, pairs=pairs)
        room = None if self.deferral.room is None else self.deferral.room * self.slices
        deferral = Deferral(self.deferral.share, room) if schedules.STYLES[self.pp_style].splits else None
        memory = RankMemory(schedule, deferral, self.offloaded, self.slices)
        even = even_memory(costs_of(Placement(placement.num_ranks)), placement.num_ranks, count)
        try:
            return partition_units(survey, costs, placement, MemoryBound(memory, self.slices * self.allowed * even))
        except NoCutError as error:
            least = math.ceil(1000 * error.least / even / self.slices) / 1000
            raise ValueError(
                f"cut_memory={self.allowed:g} is less than any cut of {survey.num_units} layers takes under "
                f"pp_style={self.pp_style!r} with num_microbatches={count} on {placement.num_ranks} ranks; the least "
                f"that works is cut_memory={least:g} (1 is what '1f1b' takes with layers dealt evenly)"
            ) from None


def room_to_wait(
    deferred_bytes: int | None,
    num_microbatches: int | None,
    model: nn.Module,
    survey: Survey,
    is_real: bool,
    working: torch.dtype | None,
) -> float | None:
    """`deferred_bytes` in activations of a layer for a microbatch; None: what fits into 1F1B's memory.

    is_real  the survey's example is a batch of the user's, of which `num_microbatches` are made; without one nobody
             knows how much a layer leaves, and there is room for everything
    working  see `plan_cut`
    """
    if not deferred_bytes:
        return deferred_bytes
    if not is_real:
        return math.inf
    try:
        counted = count_activations(model, survey.units, survey.example, working)
    except Exception:  # the model's own code, which may not run without data
        return math.inf
    return deferred_bytes * (num_microbatches or 1) * survey.num_units / max(sum(counted.kept[:-1]), 1)
