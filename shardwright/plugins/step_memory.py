"""Activations that pipeline ranks hold at the peak of a step, for the layout report."""

from __future__ import annotations

import torch
from torch import nn

from ..pipeline.activations import count_activations
from ..pipeline.executor import CutPlan
from ..pipeline.memory import memory_curves
from ..pipeline.schedules import Schedule
from ..pipeline.simulate import Costs, simulate
from .resolved import size


def held_note(
    model: nn.Module, plan: CutPlan, schedule: Schedule, shape: tuple[int, int], dtype: torch.dtype | None, costs: Costs | None, late: float
) -> str | None:
    """What the ranks hold; None for models that do not say that their input is token ids.

    shape  samples and tokens of a microbatch
    dtype  that the model works in; None: as it is
    costs  of the actions, for the order in which ranks get to them
    late   share of weight gradients that the schedule postpones
    """
    if getattr(model, "main_input_name", None) != "input_ids":
        return None
    ids = torch.ones(shape, dtype=torch.int64)
    batch = {"input_ids": ids}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids
    again = [plan.checkpointed[plan.placement.rank_of(stage)].get(stage, 0) for stage in range(len(plan.stages))]
    try:
        counted = count_activations(model, plan.units, batch, dtype)
    except Exception as error:  # the model's own code: anything can happen on a made-up batch
        return (
            f"activations of a step are not known: {type(model).__name__} did not run on made-up tokens ({type(error).__name__}: {error})"
        )
    kept, deferred = counted.by_stage(plan.stages, again)
    curves = memory_curves(simulate(schedule, costs).run, kept, [late * amount for amount in deferred])
    peaks = ", ".join(size(round(curve.peak)) for curve in curves)
    waiting = max(float(curve.deferred.max(initial=0.0)) for curve in curves)
    besides = f", up to {size(round(waiting))} of it for postponed weight gradients" if waiting else ""
    return f"activations at the peak of a step, by pipeline rank: {peaks}{besides}; attention as in fused kernels, without the loss"
