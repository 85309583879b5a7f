"""Activations that pipeline ranks hold at the peak of a step, on the device and in host memory, for the layout
report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ...models.config import is_encoder_decoder
from ...pipeline.cut.activations import Activations, count_activations
from ...pipeline.cut.plan import CutPlan
from ...pipeline.planning.actions import ActionList
from ...pipeline.planning.memory import Offloaded, memory_curves
from ...pipeline.planning.offload_places import LEAST_GAP, find_leaving
from ...pipeline.planning.simulate import Costs, simulate
from ...pipeline.schedules import Schedule
from .resolved import size


class Held(NamedTuple):
    """Bytes of activations at the peak of a step, by pipeline rank (empty: not known), and a word on it."""

    peaks: tuple[int, ...]
    note: str


def held_activations(
    model: nn.Module,
    plan: CutPlan,
    schedule: Schedule,
    shape: tuple[int, int],
    dtype: torch.dtype | None,
    costs: Costs | None,
    late: float,
    shares: Sequence[float] | None = None,
    slices: int = 1,
    prepare: Callable[[nn.Module], None] | None = None,
) -> Held | None:
    """What the ranks hold; None for models that do not say that their input is token ids.

    shape  samples and tokens of a microbatch
    dtype  that the model works in; None: as it is
    costs  of the actions, for the order in which ranks get to them
    late   share of weight gradients that the schedule postpones
    shares of the activations that wait in host memory, by stage
    slices of a microbatch along its sequence, as which the schedule has it
    prepare is given the copy of the model that is counted
    """
    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    ids = torch.ones(shape, dtype=torch.int64)
    batch = {"input_ids": ids}
    if is_encoder_decoder(model):
        batch["decoder_input_ids"] = ids
    recomputed = [plan.checkpointed[plan.placement.rank_of(stage)].of(stage) for stage in range(len(plan.stages))]
    try:
        counted = count_activations(model, plan.units, batch, dtype, plan.checkpointed[0].selection, prepare)
    except Exception as error:  # the model's own code: anything can happen on a made-up batch
        return Held(
            (),
            f"activations of a step are not known: {type(model).__name__} did not run on made-up tokens "
            f"({type(error).__name__}: {error})",
        )
    whole, in_part = zip(*recomputed, strict=True)
    of_whole, put_off = counted.by_stage(plan.stages, whole, in_part)
    kept, deferred = [amount / slices for amount in of_whole], [amount / slices for amount in put_off]
    away = (
        Offloaded(shares, [amount / slices for amount in leaving_bytes(counted, plan)]) if shares is not None else None
    )
    curves = memory_curves(simulate(schedule, costs).run, kept, [late * amount for amount in deferred], away)
    peaks = tuple(round(curve.peak) for curve in curves)
    waiting = max(float(curve.deferred.max(initial=0.0)) for curve in curves)
    besides = f", up to {size(round(waiting))} of it for postponed weight gradients" if waiting else ""
    if away is not None:
        host = ", ".join(size(round(float(curve.host.max(initial=0.0)))) for curve in curves)
        besides += f"; in host memory: {host}"
    ranks = ", by pipeline rank" if len(peaks) > 1 else ""
    return Held(
        peaks,
        f"activations at the peak of a step{ranks}: {', '.join(map(size, peaks))}{besides}; attention as in fused "
        "kernels, without the loss",
    )


def leaving_bytes(counted: Activations, plan: CutPlan) -> list[float]:
    """What of one microbatch can leave, by stage: all but what the stage has received, which the runtime holds, and
    what selectively recomputed layers keep besides their inputs."""
    numbers = [sum(plan.checkpointed[plan.placement.rank_of(stage)].of(stage)) for stage in range(len(plan.stages))]
    seen, _ = counted.by_stage(plan.stages, numbers, [0] * len(numbers))
    received = [
        float(counted.recomputed[units.start]) if stage and len(units) else 0.0
        for stage, units in enumerate(plan.stages)
    ]
    return [max(amount - own, 0.0) for amount, own in zip(seen, received, strict=True)]


def leaving_note(schedule: Schedule, shares: Sequence[float]) -> str:
    """How many microbatches leave."""
    counts = [0] * len(shares)
    for actions in schedule.actions:
        compact = ActionList.of(actions)
        for place in find_leaving(compact, shares).forward.tolist():
            counts[compact[place].stage] += 1
    if not any(counts):
        return (
            f"offload_activations: nothing leaves, because fewer than {LEAST_GAP} actions lie between forward and "
            "backward of every microbatch; more pipeline ranks, microbatches or chunks make longer waits"
        )
    return (
        "offload_activations: microbatches whose activations wait in host memory, by stage: "
        f"{', '.join(map(str, counts))}"
    )
