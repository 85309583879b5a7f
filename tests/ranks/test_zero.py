"""ZeRO stages 0, 1, 1.5 and 2 against one process."""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import pytest
import torch
from zero_cases import SAMPLES, Model, Plan, Trace, adafactor, batch, loss_of, reference, sgd, uses

from shardwright.cluster.mesh import ParallelMesh
from shardwright.comm.compat import post_accumulate_hooks
from shardwright.testing import run_ranks
from shardwright.zero import layout
from shardwright.zero.optimizer import ZeroOptimizer
from shardwright.zero.settings import ZeroSettings

TINY_BUCKET = 700e-6  # 700 elements: several buckets, some of one parameter


def train(
    plan: Plan, mesh: ParallelMesh, rank: int, world_size: int, *, explicit: bool = False, **options: object
) -> Trace:
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
    own = {name: options.pop(name) for name in list(options) if name in ZeroSettings.__dataclass_fields__}
    settings = ZeroSettings(max_norm=plan.max_norm, bucket_size_in_m=TINY_BUCKET, **own)
    zero = ZeroOptimizer(optim, model, mesh, settings, **options)
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
                got[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name, s=step: f"{label}: grad {n} step {s}: {m}",
            )
    for step, (got, wanted) in enumerate(zip(trace.weights, expected.weights, strict=True)):
        for name, value in wanted.items():
            torch.testing.assert_close(
                got[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name, s=step: f"{label}: {n} step {s}: {m}",
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
    layout.ALIGN = 16  # cut parameters in more places
    choices = ({}, {"explicit": True, "overlap_communication": False, "overlap_allgather": True})
    runs = 0
    for name, plan in plans.items():
        expected = reference(plan)
        tolerance = 1e-10 if plan.dtype == torch.float64 else 1e-6
        for stage, (size, mesh) in itertools.product((0, 1, 2), meshes.items()):
            if stage == 0 and size > 1:
                continue
            runs += 1
            for options in choices if plan.accumulation > 1 else choices[runs % 2 :][:1]:
                options = {**options, "overlap_allgather": stage > 0 and "overlap_allgather" in options}
                trace = train(plan, mesh, rank, world_size, stage=stage, **options)
                assert_same(trace, expected, tolerance, f"{name}, stage {stage}, k {size}, {options}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_stages_match_one_process(world_size: int) -> None:
    # That collectives match is checked on two ranks.
    run_ranks(stages_match, world_size, timeout=200, debug="DETAIL" if world_size == 2 else "OFF")


def runtime_driven(rank: int, world_size: int) -> None:
    """A runtime with two model parts and several microbatches that calls `reduce_grad` itself, as pipelines do.

    Half of the gradients bypass autograd's hooks: they are written to .grad the way deferred weight gradients are.
    """
    mesh = ParallelMesh()
    plan = Plan(torch.float64, accumulation=2, max_norm=0.4)
    expected = reference(plan)
    for stage in (0, 1, 2):
        model = Model(plan.dtype)
        # tied by hand below: parts share no parameter
        model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
        parts = torch.nn.ModuleList(
            [
                torch.nn.ModuleList([model.embed, model.first, model.norm]),
                torch.nn.ModuleList([model.sometimes, model.second]),
            ]
        )
        sections = {param: number for number, part in enumerate(parts) for param in part.parameters()}
        zero = ZeroOptimizer(
            torch.optim.AdamW(parts.parameters(), lr=1e-2),
            parts,
            mesh,
            ZeroSettings(stage=stage, bucket_size_in_m=TINY_BUCKET),
            launch_in_backward=False,
            sections=sections,
        )
        assert {bucket.plan.family.section for bucket in zero.buckets} == {0, 1}
        share = SAMPLES // world_size
        deferred = [model.second.weight, model.first.weight]
        for micro in range(plan.accumulation):
            zero.require_sync = micro == plan.accumulation - 1
            model.head.weight.data.copy_(model.embed.weight)
            loss = loss_of(model, batch(0, micro)[rank * share : (rank + 1) * share]) / plan.accumulation
            hooked = [param for param in sections if param not in set(deferred)]
            late = torch.autograd.grad(loss, deferred, retain_graph=True)
            zero.backward(loss, inputs=hooked)
            for param, grad in zip(deferred, late, strict=True):
                param.grad = grad if param.grad is None else param.grad.add_(grad)
                for hook in post_accumulate_hooks(param):
                    hook(param)
            if stage == 2 or zero.require_sync:
                zero.reduce_grad(1, last=zero.require_sync)
                zero.reduce_grad(0, last=zero.require_sync)
        grads = zero.gradients()
        names = {"embed": "0.0", "first": "0.1", "norm": "0.2", "sometimes": "1.0", "second": "1.1"}
        for name, wanted in expected.grads[0].items():
            part, _, rest = name.partition(".")
            if part in names and part != "embed":  # the reference's embedding is tied to the head
                got = grads[f"{names[part]}.{rest}"]
                torch.testing.assert_close(
                    got, wanted, rtol=1e-10, atol=1e-10, msg=lambda m, n=name, s=stage: f"stage {s}: {n}: {m}"
                )
        zero.step()
        with pytest.raises(ValueError, match="zero_grad"):
            zero.backward(loss_of(model, batch(0, 0)))
        zero.release()


def test_runtimes_reduce_without_hooks() -> None:
    run_ranks(runtime_driven, 2, timeout=60)
