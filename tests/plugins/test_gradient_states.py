"""Gradients in every state that a script may catch them in: accumulated again, clipped, read, scaled; weights
written to meanwhile.
"""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwright import Booster
from shardwright.booster.mixed_precision import FP16MixedPrecision
from shardwright.comm.compat import without_torch_function
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import keep_float64, run_ranks, zoo
from shardwright.utils.tensors import local_tensor


def small(value: float = 0.5) -> nn.Linear:
    """A layer whose gradient is exact in 16 bits."""
    layer = nn.Linear(4, 2, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def boost(plugin: Any, model: nn.Module, optim: torch.optim.Optimizer | None = None) -> tuple[Booster, Any, Any]:
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optim or torch.optim.SGD(model.parameters(), lr=1.0))
    return booster, model, optimizer


def plugin_of(stage: int, **options: Any) -> Any:
    return LowLevelZeroPlugin(stage=stage, **options) if stage else HybridParallelPlugin(zero_stage=0, **options)


# Accumulating after a reduction.


def second_backward_with_shared_rows(rank: int, world: int) -> None:
    """Key and value heads that both tensor-parallel ranks hold, whose gradients are summed over them."""
    batches = [zoo.inputs("llama-causal-lm", batch_size=2, seed=seed) for seed in (3, 4, 5)]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    plain = zoo.build("llama-causal-lm", seed=0, dtype=torch.float64, **heads)
    for batch in batches:
        plain(**batch).loss.backward()
    wanted = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
    for stage in (0, 1, 2, 3):
        model = zoo.build("llama-causal-lm", seed=0, dtype=torch.float64, **heads)
        booster, model, optim = boost(
            HybridParallelPlugin(tp_size=2, precision="fp32", zero_stage=stage, num_microbatches=2), model
        )
        booster.execute_pipeline(iter([batches[0]]), model, lambda outputs, _: outputs.loss, optim)
        optim.get_grad_norm()
        booster.backward(model(**batches[1]).loss, optim)
        booster.backward(model(**batches[2]).loss, optim)
        norm = optim.get_grad_norm()
        assert norm == pytest.approx(float(wanted), rel=1e-10), f"stage {stage}: {norm}, in one process {float(wanted)}"


def second_backward_on_a_16_bit_wire(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        for precision, masters in (("fp32", True), ("bf16", True), ("bf16", False)):
            if stage == 0 and not masters:
                continue
            options = {"master_weights": False} if not masters else {}
            plugin = plugin_of(stage, precision=precision, communication_dtype=torch.bfloat16, **options)
            for no_sync in (False, True):
                booster, model, optim = boost(plugin, small())
                for number in range(3):
                    with booster.no_sync(model, optim) if no_sync and number < 2 else nullcontext():
                        booster.backward(model(torch.full((1, 4), float(1 + rank))).float().sum(), optim)
                for name, grad in optim.gradients().items():
                    assert torch.equal(grad.float(), torch.full((2, 4), 4.5)), (
                        stage,
                        precision,
                        masters,
                        no_sync,
                        name,
                        grad,
                    )


def several_pipelines_before_a_step(rank: int, world: int) -> None:
    batches = [zoo.inputs("llama-tied-causal-lm", batch_size=3, seed=seed) for seed in (3, 4, 5)]
    plain = zoo.build("llama-tied-causal-lm", seed=0, dtype=torch.float64)
    for batch in batches:
        plain(**batch).loss.backward()
    wanted = float(torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()]))
    for stage, style in ((0, "zb"), (1, "1f1b"), (2, "zb"), (3, "1f1b")):
        model = zoo.build("llama-tied-causal-lm", seed=0, dtype=torch.float64)
        plugin = HybridParallelPlugin(pp_size=2, precision="fp32", zero_stage=stage, num_microbatches=3, pp_style=style)
        booster, model, optim = boost(plugin, model)
        for number, batch in enumerate(batches):
            with booster.no_sync(model, optim) if number == 1 and stage < 3 else nullcontext():
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optim)
            if number == 0:
                optim.get_grad_norm()
        assert optim.get_grad_norm() == pytest.approx(wanted, rel=1e-10), f"stage {stage}"
        optim.step()
        optim.zero_grad()


def accumulating_again(rank: int, world: int) -> None:
    second_backward_on_a_16_bit_wire(rank, world)
    with keep_float64():
        second_backward_with_shared_rows(rank, world)
        several_pipelines_before_a_step(rank, world)


@pytest.mark.timeout(240)
def test_accumulating_after_a_reduction() -> None:
    run_ranks(accumulating_again, 2, timeout=200)


# Scaled gradients.


class SignStep(torch.optim.AdamW):
    """A subclass with a step of its own, which reads neither `grad_scale` nor `found_inf`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"])


class Foreign(torch.optim.Optimizer):
    """Another package's optimizer, to which "fused" means something else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.25, "fused": True})

    step = SignStep.step


def steps_of_their_own(rank: int, world: int) -> None:
    optimizers = (
        lambda params: SignStep(params, lr=0.25),
        lambda params: SignStep(params, lr=0.25, fused=True),
        Foreign,
    )
    # Every pair of optimizer, stage, precision and whether norms are measured.
    for at, make in enumerate(optimizers):
        for stage in (0, 1, 2, 3):
            for number, precision in enumerate(("fp32", "bf16", "fp16")):
                model = small()
                max_norm = (0.0, 1e9)[(at + stage + number) % 2]
                booster, model, optim = boost(
                    plugin_of(stage, precision=precision, max_norm=max_norm, initial_scale=256.0),
                    model,
                    make(model.parameters()),
                )
                booster.backward(model(torch.full((1, 4), float(rank + 1))).float().sum(), optim)
                optim.step()
                weight = next(iter(model.parameters())).detach()
                weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
                assert torch.equal(weight.float(), torch.full((2, 4), 0.5 - 0.25 * 1.5)), (
                    make,
                    stage,
                    precision,
                    max_norm,
                    weight,
                )


def overflow_before_clipping_by_value(rank: int, world: int) -> None:
    for stage in (0, 1, 2, 3):
        for again in (False, True):
            booster, model, optim = boost(
                plugin_of(stage, precision="fp16", hysteresis=1, initial_scale=256.0), small()
            )
            booster.backward(model(torch.ones(1, 4)).float().sum() * (1e5 if rank == 0 else 1.0), optim)
            optim.clip_grad_by_value(1.0)
            if again:
                booster.backward(model(torch.ones(1, 4)).float().sum(), optim)
            optim.step()
            assert optim.scaler.skipped_steps == 1, (stage, again)
            assert float(optim.scaler.scale) == 128.0
    booster = Booster(mixed_precision=FP16MixedPrecision(initial_scale=256.0), plugin=TorchDDPPlugin())
    model = small()
    model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.25))
    booster.backward(model(torch.ones(1, 4)).float().sum(), optim)
    assert optim.get_grad_norm() == pytest.approx(8**0.5)
    booster.backward(model(torch.ones(1, 4)).float().sum(), optim)
    assert optim.get_grad_norm() == pytest.approx(2 * 8**0.5)
    optim.zero_grad()
    model(torch.ones(1, 4)).float().sum().backward()
    with pytest.raises(ValueError, match=r"booster.backward\(loss, optimizer\) instead"):
        optim.step()


def norms_and_dtypes(rank: int, world: int) -> None:
    for stage in (0, 1, 2, 3):
        booster, model, optim = boost(plugin_of(stage, precision="fp32"), small())
        assert optim.get_grad_norm() is None
        booster.backward(model(torch.ones(1, 4)).sum(), optim)
        optim.step()
        optim.zero_grad()
        assert optim.get_grad_norm() is None  # nothing was measured
        booster.backward(model(torch.ones(1, 4)).sum(), optim)
        optim.clip_grad_by_norm(0.1)
        optim.step()
        optim.zero_grad()
        assert optim.get_grad_norm() == pytest.approx(8**0.5)
    for make in (HybridParallelPlugin, LowLevelZeroPlugin):
        with pytest.raises(ValueError, match="16 bits or more"):
            make(communication_dtype=torch.float8_e4m3fn)


def scaled(rank: int, world: int) -> None:
    steps_of_their_own(rank, world)
    overflow_before_clipping_by_value(rank, world)
    norms_and_dtypes(rank, world)


@pytest.mark.timeout(240)
def test_factors_reach_every_optimizer() -> None:
    run_ranks(scaled, 2, timeout=200, debug="INFO")  # DistributedDataParallel


# Weights.


def written_weights(rank: int, world: int) -> None:
    """Whatever is written to the weights of a half-precision model is there after the next step."""
    state = {"weight": torch.full((2, 4), 3.0)}

    def by_hand(model: nn.Module) -> None:
        with torch.no_grad():
            model.weight.copy_(state["weight"])

    def through_data(model: nn.Module) -> None:
        model.weight.data.fill_(3.0)

    def assigned(model: nn.Module) -> None:
        model.weight.data = state["weight"].to(model.weight.dtype)

    ways = (
        lambda model: model.load_state_dict(state),
        by_hand,
        lambda model: nn.init.constant_(model.weight, 3.0),
        through_data,
        assigned,
    )
    for stage in (0, 1, 2):
        for overlap in (False, True) if stage else (False,):
            for way in ways:
                options = {"overlap_allgather": True} if overlap else {}
                booster, model, optim = boost(plugin_of(stage, precision="bf16", **options), small())
                for _ in range(2):
                    booster.backward(model(torch.ones(1, 4)).float().sum(), optim)
                    optim.step()
                    optim.zero_grad()
                way(model)
                assert not optim.shards() or float(optim.shards()[0].master.flatten()[0]) == 3.0
                booster.backward(model(torch.ones(1, 4)).float().sum(), optim)
                optim.step()
                assert torch.equal(model.weight.detach().float(), torch.full((2, 4), 2.0)), (stage, overlap)


def clipped_weights(rank: int, world: int) -> None:
    """Weights clipped through `.data`: the clip stays, and what it leaves alone keeps the precision of its master."""
    start = torch.linspace(-0.21, 0.4, 8).view(2, 4)  # the last two above the bound, from which the step moves away
    for stage, precision in ((0, "bf16"), (1, "fp16"), (2, "bf16")):
        layer, plain = small(), small()
        for each in (layer, plain):
            each.weight.data.copy_(start)
        optim = torch.optim.SGD(layer.parameters(), lr=2.0**-12)
        booster, model, optim = boost(plugin_of(stage, precision=precision, initial_scale=256.0), layer, optim)
        kept = model.weight.data  # as a script does that looks its weights up once
        for number in range(8):
            kept.clamp_(-0.25, 0.25) if number % 2 else model.weight.data.clamp_(-0.25, 0.25)
            plain.weight.data.clamp_(-0.25, 0.25)
            booster.backward(model(torch.full((1, 4), float(1 + rank))).float().sum(), optim)
            optim.step()
            optim.zero_grad()
            plain.weight.data.sub_(1.5 * 2.0**-12)  # lost eight times over where masters are rounded
        shards = {tuple(range(shard.start, shard.stop)): shard.master for shard in optim.shards()}
        for where, master in shards.items():
            torch.testing.assert_close(master, plain.weight.detach().flatten()[list(where)], rtol=0, atol=1e-7)


def captured_weights(rank: int, world: int) -> None:
    """An average over parameters captured before boost, read between step and the arrival of the gathers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(8)])
    raw = list(model.parameters())
    booster, model, optim = boost(
        LowLevelZeroPlugin(stage=1, precision="fp32", overlap_allgather=True, reduce_bucket_size_in_m=0.1), model
    )
    for number in range(3):
        booster.backward(model(torch.ones(2, 512)).sum(), optim)
        optim.step()
        assert raw[0].shape == (512, 512)
        assert raw[0].dtype == torch.float32
        early = [
            raw[0].detach().clone(),
            *[value.clone() for value in torch._foreach_mul(raw[1:4], 1.0)],
            *map(copy.deepcopy, raw[4:]),
        ]
        optim.gatherer.wait()
        for one, param in zip(early, raw, strict=True):
            assert type(param) is not type(None)
            assert torch.equal(one, param)
        if number < 2:
            optim.zero_grad()
            assert {type(param) for param in raw} == {nn.Parameter}


def first_weights(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    nn.init.constant_(model[0].weight, float(rank))
    model[1].running_mean.fill_(float(rank))
    booster, model, _ = boost(TorchFSDPPlugin(), model)
    params = {name: param.full_tensor() for name, param in model.named_parameters()}
    assert not params["0.weight"].any()
    assert not model.unwrap()[1].running_mean.any()
    with booster.no_sync(model):
        with booster.no_sync(model):
            pass
        assert not model.syncs
    assert model.syncs


def weights(rank: int, world: int) -> None:
    written_weights(rank, world)
    clipped_weights(rank, world)
    captured_weights(rank, world)
    first_weights(rank, world)


@pytest.mark.timeout(240)
def test_weights_are_those_that_were_written() -> None:
    run_ranks(weights, 2, timeout=200)


# Pipelines.


def with_unused(precision: str, stage: int, style: str, microbatches: int) -> tuple[Booster, Any, Any]:
    model = zoo.build("llama-causal-lm", seed=0, dtype=torch.float32)
    for layer in model.model.layers:
        layer.extra = nn.Linear(4, 4, bias=False)
        nn.init.ones_(layer.extra.weight)
    plugin = HybridParallelPlugin(
        pp_size=2, precision=precision, zero_stage=stage, num_microbatches=microbatches, pp_style=style
    )
    return boost(plugin, model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5))


def pipelines(rank: int, world: int) -> None:
    for stage, style in ((0, "1f1b"), (1, "zb"), (2, "1f1b"), (3, "1f1b")):
        booster, model, optim = with_unused("fp32", stage, style, 2)
        before = {name: local_tensor(param.detach()).clone() for name, param in model.named_parameters()}
        booster.execute_pipeline(
            iter([zoo.inputs("llama-causal-lm", batch_size=2, seed=3)]), model, lambda outputs, _: outputs.loss, optim
        )
        optim.step()
        for name, param in model.named_parameters():
            assert torch.equal(local_tensor(param), before[name]) == ("extra" in name), (stage, style, name)
    found = []
    for stage in (1, 2):
        booster, model, optim = with_unused("bf16", stage, "1f1b", 16)
        batch = zoo.inputs("llama-causal-lm", batch_size=16, seed=3)
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optim)
        found.append(optim.gradients())
        layout = booster.plugin.layout
        assert any("reduces gradients in every microbatch" in note for note in layout.notes) == (stage == 2)
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), f"stage 2 accumulates {name} in another precision than stage 1"


@pytest.mark.timeout(240)
def test_pipelines_skip_the_unused_and_accumulate_in_fp32() -> None:
    run_ranks(pipelines, 2, timeout=200)


# Leaks.


def census() -> tuple[int, int]:
    """Live tensors, and bytes of the storages that they share."""
    gc.collect()
    storages, number = {}, 0
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and not issubclass(type(item), DTensor):
            with without_torch_function():  # a rank that still has one more parameter must not gather it alone
                storage = item.untyped_storage()
            number += 1
            storages[storage.data_ptr()] = storage.nbytes()
    return number, sum(storages.values())


def alike(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """A leak adds at least a tensor per boost or step. One more or less is a collective that the backend's thread
    has just ended.
    """
    return abs(after[0] - before[0]) < 5 and abs(after[1] - before[1]) < 1024


def train(booster: Booster, model: Any, optim: Any, steps: int = 1) -> None:
    for _ in range(steps):
        for _ in range(2):
            booster.backward(model(torch.ones(2, 32)).float().sum(), optim)
        optim.step()
        optim.zero_grad()


def leaks(rank: int, world: int) -> None:
    gc.collect()
    gc.freeze()  # what was there before is out of the census
    for make in (
        lambda: LowLevelZeroPlugin(stage=1, precision="bf16", overlap_allgather=True),
        lambda: LowLevelZeroPlugin(stage=2, precision="bf16"),
        lambda: HybridParallelPlugin(precision="bf16"),
    ):
        booster, seen, counts = Booster(plugin=make()), [], []
        for number in range(20):
            model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            boosted, optim, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
            train(booster, boosted, optim)
            seen.append(weakref.ref(optim))
            del boosted, optim
            counts += [census()] if number in (2, 19) else []
        assert not any(ref() for ref in seen)
        assert alike(*counts), counts
        assert all(len(param._post_accumulate_grad_hooks or ()) == 0 for param in model.parameters())
    plugin, counts = LowLevelZeroPlugin(stage=3, precision="bf16"), []
    booster = Booster(plugin=plugin)
    for number in range(20):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        boosted, optim, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
        train(booster, boosted, optim)
        del model, boosted, optim
        counts += [census()] if number in (2, 19) else []
    assert alike(*counts), counts
    for stage in (0, 1, 2, 3):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        booster, model, optim = boost(plugin_of(stage, precision="bf16", max_norm=1.0), model)
        train(booster, model, optim, 3)
        before = census()
        train(booster, model, optim, 200)
        after = census()
        assert alike(before, after), f"stage {stage}: {before} tensors and bytes grew to {after}"
    dist.barrier()


@pytest.mark.timeout(240)
def test_nothing_is_left_of_dropped_jobs_and_past_steps() -> None:
    run_ranks(leaks, 2, timeout=200)
