"""ZeRO stages 0, 1, 1.5 and 2 against one process."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from zero_cases import SAMPLES, Model, Plan, Trace, adafactor, batch, loss_of, reference, sgd, uses

from shardwright.cluster.mesh import ParallelMesh
from shardwright.testing import run_ranks
from shardwright.zero.optimizer import ZeroOptimizer

TINY_BUCKET = 700e-6  # 700 elements: several buckets, some of one parameter


def train(plan: Plan, mesh: ParallelMesh, rank: int, world_size: int, *, explicit: bool = False, **options: object) -> Trace:
    """Train this rank's samples. `explicit`: the script uses no_sync; else every microbatch is reduced."""
    model = Model(plan.dtype)
    if rank:
        with torch.no_grad():  # rank 0's weights must win
            for param in model.parameters():
                param.add_(0.5)
    frozen = Model(plan.dtype).frozen.state_dict()
    model.frozen.load_state_dict(frozen)
    optim = plan.optimizer(model)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2, 0.5)
    zero = ZeroOptimizer(optim, model, mesh, max_norm=plan.max_norm, bucket_size_in_m=TINY_BUCKET, **options)
    share = SAMPLES // world_size
    trace = Trace([], [], [], [])
    for step in range(plan.steps):
        total = 0.0
        for micro in range(plan.accumulation):
            tokens = batch(step, micro)[rank * share : (rank + 1) * share]
            last = micro == plan.accumulation - 1
            with zero.no_sync() if explicit and not last else nullcontext():
                loss = loss_of(model, tokens, uses(plan, step)) / plan.accumulation
                zero.backward(loss)
            total += loss.item()
        trace.grads.append(zero.gradients())
        trace.norms.append(zero.get_grad_norm())
        zero.step()
        schedule.step()
        zero.zero_grad()
        zero.gatherer.wait()
        trace.losses.append(total)
        trace.weights.append({name: param.detach().clone() for name, param in model.named_parameters()})
    zero.release()
    return trace


def assert_same(trace: Trace, expected: Trace, tolerance: float, label: str) -> None:
    for step, (got, wanted) in enumerate(zip(trace.norms, expected.norms, strict=True)):
        assert abs(got - wanted) <= tolerance * max(1.0, wanted), f"{label}: norm of step {step}: {got} != {wanted}"
    for step, (got, wanted) in enumerate(zip(trace.grads, expected.grads, strict=True)):
        for name, value in wanted.items():
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name, s=step: f"{label}: grad {n} step {s}: {m}"
            )
    for step, (got, wanted) in enumerate(zip(trace.weights, expected.weights, strict=True)):
        for name, value in wanted.items():
            torch.testing.assert_close(
                got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name, s=step: f"{label}: {n} step {s}: {m}"
            )


def assert_bitwise(trace: Trace, expected: Trace, label: str) -> None:
    for got, wanted in zip(trace.weights, expected.weights, strict=True):
        for name, value in wanted.items():
            assert torch.equal(got[name], value), f"{label}: {name} differs by {(got[name] - value).abs().max()}"


def stages_match(rank: int, world_size: int) -> None:
    plans = {
        "plain": Plan(torch.float64),
        "clipped, accumulated": Plan(torch.float64, max_norm=0.3, accumulation=3),
        "unused at times": Plan(torch.float64, sometimes=True, max_norm=0.5),
        "sgd": Plan(torch.float64, optimizer=sgd, sometimes=True),
        "whole parameters": Plan(torch.float64, optimizer=adafactor, max_norm=0.3, sometimes=True),
        "fp32": Plan(max_norm=0.5, accumulation=2),
    }
    sizes = [size for size in (1, 2, 4) if size <= world_size]
    meshes = {size: ParallelMesh(zero_group_size=size) for size in sizes}
    for name, plan in plans.items():
        expected = reference(plan)
        tolerance = 1e-10 if plan.dtype == torch.float64 else 1e-6 * 5
        for stage, (size, mesh) in itertools.product((0, 1, 2), meshes.items()):
            if stage == 0 and size > 1:
                continue
            for options in ({}, {"explicit": True, "overlap_communication": False, "overlap_allgather": True}):
                trace = train(plan, mesh, rank, world_size, stage=stage, **options)
                assert_same(trace, expected, tolerance, f"{name}, stage {stage}, k {size}, {options}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_match_one_process(world_size: int) -> None:
    run_ranks(stages_match, world_size, timeout=200)
