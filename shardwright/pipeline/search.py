"""`pp_style="auto"`: the schedule, number of chunks, depth of the warm-up and cut under which a step is shortest, as the simulator has it.

Every style with every number of chunks that the model has layers for is cut by `balance`, simulated with the costs of its stages, and
taken if its ranks hold no more than allowed. What is compared is not the bubble but the length of the step, which also has in it how
evenly the model divides. Candidates are few and take milliseconds, so all are tried: the choice is never worse than a style named by
hand with the cut that it would get. Assumptions are the simulator's:

    backward   twice a forward, and the forward again, or its cheap part, where layers are recomputed; of zero bubble's W as much as can
               be deferred
    waiting    under tensor parallelism a layer's forward waits for two all-reduces of one hidden state per token, COLLECTIVE_COST for each
               feature that a rank sends: 2 bytes at 300 GB/s. Pairs of actions hide it; a backward's pass behind its weight gradients
    transfer   of one hidden state per token, MESSAGE_COST parameters' worth of arithmetic for each of its features: about 2 bytes
               at 50 GB/s beside 2 operations per parameter at 400 TFLOP/s. Under tensor parallelism every rank sends all of it
    memory     a layer's activations count 1, RECOMPUTED where it is recomputed, SELECTIVE where it is in part; all but what a stage has
               received and what selective layers keep besides their inputs can wait in host memory. Inputs and output gradients of a
               layer's linears, which deferred weight gradients wait with, are about as much as all that it keeps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from . import schedules
from .balance import ChainCosts
from .memory import Offloaded, memory_curves
from .partition import text_config, unit_costs
from .placement import Placement
from .simulate import Costs, simulate
from .survey import Survey

MESSAGE_COST = 8000.0
COLLECTIVE_COST = 1333.0
RECOMPUTED = 1 / 16
SELECTIVE = 0.4
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

    @property
    def name(self) -> str:
        chunks = f" with {self.placement.num_chunks} chunks" if self.pp_style == "interleaved" else ""
        return f"{self.pp_style}{chunks}"


class Found(NamedTuple):
    """The best candidate, and all in the order of their makespan; `limit` is the memory that was allowed."""

    best: Candidate
    candidates: list[Candidate]
    limit: float

    def __str__(self) -> str:
        best = self.best
        fastest = {other.pp_style: other for other in reversed(self.candidates) if other.pp_style != best.pp_style}
        others = [
            f"{other.name} {other.makespan / best.makespan:.2f}" + (" (too much memory)" if other.memory > self.limit else "")
            for other in sorted(fastest.values(), key=lambda other: other.makespan)
        ]
        return (
            f"pp_style='auto' chose {best.name}: simulated bubble {best.bubble:.1%} with the costs of these stages and their messages; "
            f"length of a step over its: {', '.join(others)}"
        )


class Transfers(NamedTuple):
    """In the unit of the chain's costs.

    message  time of a message to the next stage
    waiting  of a layer's forward for the ranks that share its arithmetic
    counted  whether the chain's costs have it in them already, as those that were measured
    """

    message: float = 0.0
    waiting: float = 0.0
    counted: bool = False


NO_TRANSFERS = Transfers()


def transfers(model: nn.Module, costs: ChainCosts, survey: Survey, copies: int, measured: bool) -> Transfers:
    """What layers and stages exchange; `copies` ranks share the arithmetic, and each sends all."""
    hidden = getattr(text_config(model), "hidden_size", 0)
    unit = sum(costs.forward) / sum(unit_costs(model, survey)) if measured else 1.0
    features = hidden * copies * unit if isinstance(hidden, int) else 0.0
    return Transfers(MESSAGE_COST * features, 2 * COLLECTIVE_COST * features * 2 * (copies - 1) / copies, measured)


def search(
    num_ranks: int,
    num_layers: int,
    num_microbatches: int,
    costs_of: Callable[[Placement], ChainCosts],
    cut: Callable[[ChainCosts, Placement], list[range]],
    *,
    transfers: Transfers = NO_TRANSFERS,
    deferred: float = 0.0,
    allowed: float = 1.5,
    offloaded: float = 0.0,
) -> Found:
    """Try everything.

    transfers  what layers and stages exchange. Pairs of actions are made where layers wait
    deferred  share of the weight gradients that a zero-bubble schedule can put off
    allowed   memory, over that of 1F1B
    offloaded share of the activations that waits in host memory
    """
    candidates = []
    for name, style in schedules.STYLES.items():
        most = min(style.max_chunks or MAX_CHUNKS, num_layers // num_ranks)
        for chunks in range(style.min_chunks, most + 1):
            placement = schedules.get_placement(name, num_ranks, chunks)
            costs = costs_of(placement)
            stages = cut(costs, placement)
            candidates.append(_try(name, placement, costs, stages, num_microbatches, transfers, deferred, offloaded))
    limit = allowed * next(candidate.memory for candidate in candidates if candidate.pp_style == "1f1b") * (1 + 1e-9)
    candidates.sort(key=lambda candidate: (candidate.makespan, candidate.memory))
    fitting = [candidate for candidate in candidates if candidate.memory <= limit]
    # Of steps of the same length, to a thousandth, the one that holds least.
    best = min((c for c in fitting if c.makespan <= fitting[0].makespan * 1.001), key=lambda c: (c.memory, c.placement.num_chunks))
    return Found(best, candidates, limit)


def _try(
    name: str,
    placement: Placement,
    costs: ChainCosts,
    stages: Sequence[range],
    microbatches: int,
    transfers: Transfers,
    deferred: float,
    offloaded: float,
) -> Candidate:
    arithmetic, again = costs.of_actions(stages)
    layers = np.array([len(units) for units in stages])
    waiting = layers * transfers.waiting
    recomputed, in_part = costs.layers_recomputed(stages)
    forward = arithmetic if transfers.counted else arithmetic + waiting
    splits = schedules.STYLES[name].splits
    late = deferred if splits else 1.0  # without a W of its own it does not matter what B is made of
    hidden = float(waiting.sum() / (forward + 2 * arithmetic + again).sum())
    input_grad, weight_grad = arithmetic * (2 - late) + again, arithmetic * late
    times = Costs(forward.tolist(), input_grad.tolist(), weight_grad.tolist(), transfers.message, hidden=hidden)
    run = simulate(schedules.get(name, placement.num_ranks, microbatches, placement.num_chunks, pairs=transfers.waiting > 0), times)
    kept = layers - recomputed * (1 - RECOMPUTED) - in_part * (1 - SELECTIVE)
    postponed = (layers * deferred).tolist() if splits else None
    away = Offloaded([offloaded] * len(stages), np.maximum(kept - in_part * (SELECTIVE - RECOMPUTED) - RECOMPUTED, 0).tolist())
    memory = max(curve.peak for curve in memory_curves(run.run, kept.tolist(), postponed, away))
    return Candidate(name, placement, list(stages), run.makespan, memory, run.bubble)
