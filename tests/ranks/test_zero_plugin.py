"""LowLevelZeroPlugin through the booster: half precision, scaling, bad input, LoRA."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from test_zero import TINY_BUCKET, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_cases import SAMPLES, Model, Plan, Trace, batch, loss_of, reference, uses

from shardwright.booster import Booster
from shardwright.cluster.mesh import ParallelMesh
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.low_level_zero import LowLevelZeroPlugin
from shardwright.testing import run_ranks
from shardwright.zero.optimizer import ZeroOptimizer


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
                trace = boosted_run(
                    plan, rank, world_size, stage=3, precision="fp32", zero_group_size=size, explicit=explicit
                )
                assert_same(trace, expected, 1e-10, f"{name}, k {size}, {explicit}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_stage_3_matches_one_process(world_size: int) -> None:
    run_ranks(stage_3, world_size, timeout=100)


def half_precision(rank: int, world_size: int) -> None:
    """bf16 and fp16 runs stay as close to the fp32 run of one process as one process under autocast does, twice
    over.
    """
    plan = Plan(max_norm=1.0, accumulation=2)
    expected = reference(plan)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with torch.autocast("cpu", dtype):
            noise = drift(reference(plan), expected)
        for options in (
            {"stage": 1},
            {"stage": 2, "communication_dtype": dtype},
            {"stage": 2, "overlap_allgather": True},
            {"stage": 3},
        ):
            trace = boosted_run(plan, rank, world_size, precision=precision, initial_scale=2.0**8, **options)
            assert drift(trace, expected) <= 2 * noise, f"{precision} {options}: {drift(trace, expected)} > 2 x {noise}"
    trace = boosted_run(plan, rank, world_size, precision="bf16", master_weights=False)
    assert drift(trace, expected) < 10 * noise  # steps rounded to 8 bits of mantissa
    wire = boosted_run(plan, rank, world_size, precision="fp32", communication_dtype=torch.bfloat16)
    assert 0 < drift(wire, expected) <= 2 * noise + 2e-3


def drift(trace: Trace, expected: Trace) -> float:
    """Largest difference of the mean loss over the run and of weights after it, relative to the weights."""
    last, wanted = trace.weights[-1], expected.weights[-1]
    difference = torch.cat([(last[name].float() - value).flatten() for name, value in wanted.items()])
    return float(difference.norm() / torch.cat([value.flatten() for value in wanted.values()]).norm())


def test_half_precision_tracks_fp32() -> None:
    run_ranks(half_precision, 2, timeout=60)


def overflow(rank: int, world_size: int) -> None:
    """An infinite gradient on one rank skips the step on all and, when patience is over, lowers the scale on all."""
    for stage, size in ((1, None), (2, 2), (3, None)):
        booster = Booster(
            plugin=LowLevelZeroPlugin(
                stage, "fp16", initial_scale=1024, hysteresis=2, growth_interval=3, zero_group_size=size
            )
        )
        model = Model()
        model, optim, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        share = SAMPLES // world_size

        def step(
            number: int,
            bad: bool = False,
            model: Model = model,
            optim: object = optim,
            share: int = share,
            booster: Booster = booster,
        ) -> bool:
            before = [weights(param) for param in model.parameters()]
            loss = loss_of(model, batch(number, 0)[rank * share : (rank + 1) * share])
            booster.backward(loss * float("inf") if bad and rank == 1 else loss, optim)
            optim.step()
            optim.zero_grad()
            return any(not torch.equal(one, weights(two)) for one, two in zip(before, model.parameters(), strict=True))

        assert step(0)
        assert not step(1, bad=True)
        assert float(optim.scaler.scale) == 1024  # forgiven
        assert not step(2, bad=True)
        assert float(optim.scaler.scale) == 512
        assert [step(number) for number in (3, 4, 5)] == [True] * 3
        assert float(optim.scaler.scale) == 1024  # grown after three clean steps
        assert optim.scaler.skipped_steps == 2
        assert all(bool(weights(param).isfinite().all()) for param in model.parameters())


def weights(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor().clone() if hasattr(param, "full_tensor") else param.detach().clone()


def test_overflow_on_one_rank_skips_on_all() -> None:
    run_ranks(overflow, 4, timeout=60)


def kept_in_fp32(rank: int, world_size: int, precision: str) -> None:
    class Mixed(nn.Module):
        _keep_in_fp32_modules = ["ranging"]  # as transformers loads it, in fp16 alone
        _keep_in_fp32_modules_strict = ["precise"]

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.ranging = nn.Linear(8, 8)
            self.precise = nn.Linear(8, 8)
            self.bn = nn.BatchNorm1d(8)
            self.register_buffer("table", torch.ones(8))
            self.register_buffer("frequencies", torch.ones(8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x) * self.table
            hidden = self.ranging(hidden.to(self.ranging.weight.dtype))
            return self.bn(self.precise(hidden.to(self.precise.weight.dtype)))

    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    booster = Booster(plugin=LowLevelZeroPlugin(precision=precision))
    model = Mixed()
    model, optim, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    assert model.first.weight.dtype == half
    assert model.ranging.weight.dtype == (torch.float32 if precision == "fp16" else half)
    assert {
        model.precise.weight.dtype,
        model.bn.weight.dtype,
        model.bn.running_mean.dtype,
        model.frequencies.dtype,
    } == {torch.float32}
    assert model.table.dtype == half
    booster.backward(model(torch.randn(4, 8)).float().sum(), optim)
    assert {bucket.shard_grad.dtype for bucket in optim.buckets} == {torch.float32}
    optim.step()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_some_modules_stay_in_fp32(precision: str) -> None:
    run_ranks(kept_in_fp32, 2, precision, timeout=60)


def bad_input(rank: int, world_size: int) -> None:
    def boost(model: nn.Module, optim: torch.optim.Optimizer | None, **options: object) -> None:
        Booster(plugin=LowLevelZeroPlugin(**{"precision": "fp32", **options})).boost(model, optim)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    frozen = nn.Linear(2, 2).requires_grad_(False)
    stepped = nn.Linear(2, 2)
    used = torch.optim.AdamW(stepped.parameters())
    stepped(torch.ones(1, 2)).sum().backward()
    used.step()
    split = nn.Linear(2, 2)
    split.bias = nn.Parameter(torch.zeros(2, device="meta"))
    sparse = nn.Embedding(4, 2, sparse=True)
    whole = nn.Linear(4, 4, bias=False)
    integers = nn.Linear(2, 2)
    integers.bias = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    table = [
        (lambda: boost(nn.Linear(2, 2), None, precision="fp8"), "precision=.fp8.: the device is cpu"),
        (lambda: LowLevelZeroPlugin(stage=4), "stage=4"),
        (lambda: LowLevelZeroPlugin(zero_group_size=3), "zero_group_size=3 does not divide dp_size=2.*1, 2"),
        (lambda: LowLevelZeroPlugin(extra_dp_size=3), "extra_dp_size=3"),
        (lambda: LowLevelZeroPlugin(extra_dp_size=2, zero_group_size=2), "say the same"),
        (lambda: LowLevelZeroPlugin(communication_dtype=torch.int32), "communication_dtype"),
        (lambda: LowLevelZeroPlugin(reduce_bucket_size_in_m=0), "reduce_bucket_size_in_m=0"),
        (lambda: LowLevelZeroPlugin(max_norm=-1), "max_norm=-1"),
        (lambda: LowLevelZeroPlugin(norm_type=1.0), "norm_type=1.0"),
        (lambda: boost(nn.Linear(2, 2), None, use_fp8=True), "use_fp8=True: the device is cpu"),
        (lambda: LowLevelZeroPlugin(initial_scale=0.5), "initial_scale=0.5"),
        (lambda: boost(frozen, sgd(frozen)), "no trainable parameters"),
        (lambda: boost(nn.Linear(2, 2), sgd(whole)), "not in"),
        (lambda: boost(stepped, used), "stepped already"),
        (lambda: ZeroOptimizer(sgd(split), split, mesh), "several devices"),
        (lambda: boost(sparse, sgd(sparse)), "sparse=False"),
        (lambda: boost(integers, sgd(integers)), "complex64"),
        (lambda: boost(whole, torch.optim.LBFGS(whole.parameters())), "LBFGS"),
        (lambda: boost(sparse, torch.optim.SparseAdam(sparse.parameters())), "SparseAdam"),
    ]
    mesh = ParallelMesh()
    for call, message in table:
        with pytest.raises(ValueError, match=message):
            call()


def test_bad_input_is_refused() -> None:
    run_ranks(bad_input, 2, timeout=60)


def misuse(rank: int, world_size: int) -> None:
    booster = Booster(plugin=LowLevelZeroPlugin(precision="fp32"))
    model = Model()
    model, optim, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    booster.backward(loss_of(model, batch(0, 0)), optim)
    with pytest.raises(ValueError, match="without it"):
        optim.step(lambda: None)
    optim.step()
    with pytest.raises(ValueError, match="call zero_grad"):
        booster.backward(loss_of(model, batch(0, 0)), optim)
    model.zero_grad()  # drops the preset gradients, which come back
    optim.zero_grad()
    booster.backward(loss_of(model, batch(0, 0)), optim)
    norm = optim.get_grad_norm()
    assert float(optim.clip_grad_by_norm(norm / 2)) == pytest.approx(norm)
    optim.clip_grad_by_value(1e-3)
    assert max(float(grad.abs().max()) for grad in optim.gradients().values()) == pytest.approx(1e-3)
    optim.step()
    model.frozen.requires_grad_(True)
    optim.zero_grad()
    booster.backward(loss_of(model, batch(0, 0)), optim)
    with pytest.raises(ValueError, match="unfreeze before boost"):
        optim.step()


def test_misuse_is_named() -> None:
    run_ranks(misuse, 2, timeout=60)


class Twice(nn.Module):
    """A layer that runs twice, checkpointed."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.use_reentrant)
        return x.sum()


def checkpointed_twice(rank: int, world_size: int) -> None:
    """The advice of the refusal can be followed."""
    for use_reentrant in (True, False):
        booster, bare = Booster(plugin=LowLevelZeroPlugin(2, "fp32")), Twice(use_reentrant)
        model, optim, *_ = booster.boost(bare, torch.optim.SGD(bare.parameters(), 0.1))
        loss = model(torch.ones(2, 4, requires_grad=True))
        refused = pytest.raises(ValueError, match="with use_reentrant=False") if use_reentrant else nullcontext()
        with refused:
            booster.backward(loss, optim)


def test_a_layer_that_runs_twice_is_checkpointed_without_reentering() -> None:
    run_ranks(checkpointed_twice, 1, timeout=60)


def lora(rank: int, world_size: int) -> None:
    from peft import LoraConfig

    for stage in (1, 2):
        booster = Booster(plugin=LowLevelZeroPlugin(stage, "fp32"))
        model = booster.plugin.enable_lora(
            Model(), lora_config=LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False)
        )
        trained = [param for param in model.parameters() if param.requires_grad]
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        model, optim, *_ = booster.boost(model, torch.optim.AdamW(trained, lr=1e-2))
        booster.backward(loss_of(model, batch(0, 0)), optim)
        optim.step()
        for name, param in model.named_parameters():
            assert torch.equal(param, before[name]) != ("lora" in name), name


def test_lora_adapters_train_alone() -> None:
    run_ranks(lora, 2, timeout=60)


def assigned(rank: int, world_size: int) -> None:
    """Gradients that a script makes and assigns itself: all of them, or of a parameter that no backward reaches."""
    for stage in range(4):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
        model.load_state_dict(plain.state_dict())
        reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
        booster = Booster(plugin=HybridParallelPlugin(zero_stage=stage, precision="fp32", max_norm=0.5))
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for step in range(3):
            xs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            own = xs.chunk(world_size)[rank]
            if step < 2:
                params, mine = list(plain.parameters()), list(model.parameters())
                for param, grad in zip(params, torch.autograd.grad(plain(xs).square().mean(), params), strict=True):
                    param.grad = grad
                for param, grad in zip(mine, torch.autograd.grad(model(own).square().mean(), mine), strict=True):
                    param.grad = grad
            else:
                plain[1].weight.grad = torch.ones_like(plain[1].weight)
                list(model.parameters())[2].grad = torch.ones_like(plain[1].weight)
                plain[0](xs).square().mean().backward()
                booster.backward(model.unwrap()[0](own).square().mean(), optimizer)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
            for (name, expected), found in zip(plain.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12, msg=f"{stage}, {step}: {name}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_assigned_gradients_are_stepped_on(world_size: int) -> None:
    run_ranks(assigned, world_size)
