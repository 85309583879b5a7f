"""LowLevelZeroPlugin through the booster: half precision, scaling, bad input, LoRA."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from test_zero import TINY_BUCKET, assert_same
from zero_cases import SAMPLES, Model, Plan, Trace, batch, loss_of, reference, uses

from shardwright.booster import Booster
from shardwright.plugins.low_level_zero import LowLevelZeroPlugin
from shardwright.testing import run_ranks


def boosted_run(plan: Plan, rank: int, world_size: int, *, explicit: bool = True, **options: object) -> Trace:
    booster = Booster(plugin=LowLevelZeroPlugin(max_norm=plan.max_norm, reduce_bucket_size_in_m=TINY_BUCKET, **options))
    model = Model(plan.dtype)
    optim = plan.optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    model, optim, _, _, schedule = booster.boost(model, optim, lr_scheduler=schedule)
    share = SAMPLES // world_size
    trace = Trace([], [], [], [])
    for step in range(plan.steps):
        total = 0.0
        for micro in range(plan.accumulation):
            tokens = batch(step, micro)[rank * share : (rank + 1) * share]
            with booster.no_sync(model, optim) if explicit and micro < plan.accumulation - 1 else nullcontext():
                loss = loss_of(model, tokens, uses(plan, step)) / plan.accumulation
                booster.backward(loss, optim)
            total += loss.item()
        trace.grads.append(optim.gradients())
        trace.norms.append(optim.get_grad_norm())
        optim.step()
        schedule.step()
        optim.zero_grad()
        trace.losses.append(total)
        if options.get("stage") == 3:
            trace.weights.append({name: param.full_tensor() for name, param in model.named_parameters()})
        else:
            trace.weights.append({name: param.detach().clone() for name, param in model.named_parameters()})
    return trace


def stage_3(rank: int, world_size: int) -> None:
    plans = {
        "plain": Plan(torch.float64),
        "clipped, accumulated, unused": Plan(torch.float64, max_norm=0.3, accumulation=3, sometimes=True),
    }
    for name, plan in plans.items():
        expected = reference(plan)
        for size in (None, 2):
            for explicit in (True, False):
                trace = boosted_run(plan, rank, world_size, stage=3, precision="fp32", zero_group_size=size, explicit=explicit)
                assert_same(trace, expected, 1e-10, f"{name}, k {size}, {explicit}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_stage_3_matches_one_process(world_size: int) -> None:
    run_ranks(stage_3, world_size, timeout=100)
