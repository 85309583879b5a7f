"""`pp_style="auto"`: the schedule, number of chunks, depth of the warm-up and cut under which a step is shortest, as
the simulator has it.

Every style with every number of chunks that the model has layers for is cut by `balance`, once by time alone, and where
ranks then hold more than allowed once more under that bound, simulated with the costs of its stages, and taken if its
ranks hold no more than allowed. What is compared is not the bubble but the length of the step, which also has in it how
evenly the model divides. Candidates are few and take milliseconds, so all are tried: the choice is never worse than a
style named by hand with the cut that it would get. Assumptions are the simulator's:

    backward   twice a forward, and the forward again, or its cheap part, where layers are recomputed; of zero bubble's
               W as much as can be deferred and has room to wait
    waiting    under tensor parallelism a layer's forward waits for two all-reduces of one hidden state per token,
               COLLECTIVE_COST for each feature that a rank sends: 2 bytes at 300 GB/s. Pairs of actions hide it; a
               backward's pass behind its weight gradients
    transfer   of one hidden state per token, and of the logits of all routers so far where the last stage collects
               them, MESSAGE_COST parameters' worth of arithmetic for each feature: about 2 bytes at 50 GB/s beside 2
               operations per parameter at 400 TFLOP/s. Under tensor parallelism every rank sends all of it
    memory     see `rank_memory`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ...models.config import hidden_size, num_experts
from .. import schedules
from ..cut.balance import ChainCosts, MemoryBound, NoCutError
from ..cut.entry import ENTRY
from ..cut.partition import unit_costs
from ..cut.survey import Survey
from ..schedules import Schedule
from .placement import Placement
from .rank_memory import Deferral, RankMemory, amounts
from .simulate import Costs, simulate

MESSAGE_COST = 8000.0
COLLECTIVE_COST = 1333.0
MAX_CHUNKS = 8


class Candidate(NamedTuple):
    """One way to run the model.

    makespan  of a step, in the unit of the chain's costs
    memory    activations and what deferred weight gradients wait with, on the fullest rank
    """

    pp_style: str
    placement: Placement
    stages: list[range]
    makespan: float
    memory: float
    bubble: float
    bounded: bool = False  # cut under the bound, because what time alone makes of it takes more memory

    @property
    def name(self) -> str:
        chunks = f" with {self.placement.num_chunks} chunks" if self.pp_style == "interleaved" else ""
        return f"{self.pp_style}{chunks}{' cut to fit' if self.bounded else ''}"


class Found(NamedTuple):
    """The best candidate, and all in the order of their makespan; `limit` is the memory that was allowed."""

    best: Candidate
    candidates: list[Candidate]
    limit: float

    def __str__(self) -> str:
        best = self.best
        fastest = {other.pp_style: other for other in reversed(self.candidates) if other.pp_style != best.pp_style}
        others = [
            f"{other.name} "
            f"{other.makespan / best.makespan:.2f}" + (" (too much memory)" if other.memory > self.limit else "")
            for other in sorted(fastest.values(), key=lambda other: other.makespan)
        ]
        return (
            f"pp_style='auto' chose {best.name}: simulated bubble {best.bubble:.1%} with the costs of these stages and "
            f"their messages; length of a step over its: {', '.join(others)}"
        )


class Transfers(NamedTuple):
    """In the unit of the chain's costs.

    message  time of a message to the next stage
    waiting  of a layer's forward for the ranks that share its arithmetic
    counted  whether the chain's costs have it in them already, as those that were measured
    logits   time of a message for the logits of one router
    routers  units in which there are routers whose logits travel to the last stage
    """

    message: float = 0.0
    waiting: float = 0.0
    counted: bool = False
    logits: float = 0.0
    routers: Sequence[int] = ()

    def messages(self, stages: Sequence[range]) -> list[float]:
        """Of every stage to the next one."""
        return [self.message + self.logits * sum(unit < units.stop for unit in self.routers) for units in stages]


NO_TRANSFERS = Transfers()
NOTHING_WAITS = Deferral()


def transfers(
    model: nn.Module, costs: ChainCosts, survey: Survey, copies: int, measured: bool, routers: Sequence[int] = ()
) -> Transfers:
    """What layers and stages exchange; `copies` ranks share the arithmetic, and each sends all. `routers`: see
    `Transfers`.
    """
    unit = sum(costs.forward) / sum(unit_costs(model, survey)) if measured else 1.0
    features = (hidden_size(model) or 0) * copies * unit
    logits = MESSAGE_COST * (num_experts(model) or 0) * copies * unit
    return Transfers(
        MESSAGE_COST * features, 2 * COLLECTIVE_COST * features * 2 * (copies - 1) / copies, measured, logits, routers
    )


def even_memory(costs: ChainCosts, num_ranks: int, num_microbatches: int) -> float:
    """What the fullest rank holds under 1F1B with as many layers on every rank and nothing in host memory: what
    bounds are relative to.
    """
    layers = len(costs.forward) - 1
    share, larger = divmod(layers, num_ranks)
    bounds = np.cumsum([0] + [share + (rank < larger) for rank in range(num_ranks)])
    bounds[0], bounds[-1] = ENTRY, layers + 1
    memory = RankMemory(schedules.get("1f1b", num_ranks, num_microbatches))
    return float(MemoryBound(memory, 0.0).peak(costs, bounds))


def search(
    num_ranks: int,
    num_layers: int,
    num_microbatches: int,
    costs_of: Callable[[Placement], ChainCosts],
    cut: Callable[[ChainCosts, Placement, MemoryBound | None], list[range]],
    *,
    transfers: Transfers = NO_TRANSFERS,
    deferral: Deferral = NOTHING_WAITS,
    allowed: float = 1.5,
    offloaded: float = 0.0,
) -> Found:
    """Try everything.

    transfers  what layers and stages exchange. Pairs of actions are made where layers wait
    deferral  of weight gradients under zero-bubble schedules
    allowed   memory, over `even_memory`
    offloaded share of the activations that waits in host memory
    """
    limit = allowed * even_memory(costs_of(Placement(num_ranks)), num_ranks, num_microbatches)
    candidates = []
    for name, style in schedules.STYLES.items():
        most = min(style.max_chunks or MAX_CHUNKS, num_layers // num_ranks)
        for chunks in range(style.min_chunks, most + 1):
            placement = schedules.get_placement(name, num_ranks, chunks)
            costs = costs_of(placement)
            schedule = schedules.get(name, num_ranks, num_microbatches, chunks, pairs=transfers.waiting > 0)
            away = [offloaded] * placement.num_stages if offloaded else None
            memory = RankMemory(schedule, deferral if style.splits else None, away)
            candidates.append(_try(name, schedule, costs, cut(costs, placement, None), transfers, memory))
            if candidates[-1].memory > limit * (1 + 1e-9):
                with suppress(NoCutError):
                    stages = cut(costs, placement, MemoryBound(memory, limit))
                    candidates.append(_try(name, schedule, costs, stages, transfers, memory)._replace(bounded=True))
    candidates.sort(key=lambda candidate: (candidate.makespan, candidate.memory))
    limit *= 1 + 1e-9
    fitting = [candidate for candidate in candidates if candidate.memory <= limit]
    # Of steps of the same length, to a thousandth, the one that holds least.
    best = min(
        (c for c in fitting if c.makespan <= fitting[0].makespan * 1.001),
        key=lambda c: (c.memory, c.placement.num_chunks),
    )
    return Found(best, candidates, limit)


def _try(
    name: str, schedule: Schedule, costs: ChainCosts, stages: Sequence[range], transfers: Transfers, memory: RankMemory
) -> Candidate:
    arithmetic, again = costs.of_actions(stages)
    layers, whole, in_part = costs.layers_of(stages)
    kept, leaving = amounts(layers, whole, in_part)
    waiting = layers * transfers.waiting
    forward = arithmetic if transfers.counted else arithmetic + waiting
    late: NDArray[np.float64] | float = 1.0  # without a W of its own it does not matter what B is made of
    if memory.deferral is not None:
        late = memory.deferral.share * memory.late(schedule, kept, layers)
    hidden = float(waiting.sum() / (forward + 2 * arithmetic + again).sum())
    input_grad, weight_grad = arithmetic * (2 - late) + again, arithmetic * late
    times = Costs(
        forward.tolist(), input_grad.tolist(), weight_grad.tolist(), transfers.messages(stages), hidden=hidden
    )
    run = simulate(schedule, times)
    held = float(memory.peaks(kept, leaving, layers).max())
    return Candidate(name, schedule.placement, list(stages), run.makespan, held, run.bubble)
