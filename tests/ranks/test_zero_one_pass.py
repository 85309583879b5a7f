"""Steps in one pass over the flat buffers: taken where they should be, with the numbers of plain torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from zero_cases import SAMPLES, Model, batch, groups_of, loss_of

from shardwright.cluster.mesh import ParallelMesh
from shardwright.kernels import backends, compiled_adam
from shardwright.kernels.adam import Kernel, Piece, Rule
from shardwright.optim.adam import HybridAdam
from shardwright.precision.policy import PrecisionPolicy
from shardwright.precision.scaler import ScalerConfig
from shardwright.testing import run_ranks
from shardwright.zero import one_pass
from shardwright.zero.optimizer import ZeroOptimizer
from shardwright.zero.settings import ZeroSettings

SETTINGS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 1, "overlap_allgather": True},
    {"stage": 2},
    {"stage": 3},
    {"stage": 1, "cpu_offload": True},
    {"stage": 3, "cpu_offload": True},
]


class Own(torch.optim.AdamW):
    """Another optimizer, for all one knows."""


def hooked(params: Any, **options: Any) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(params, **options)
    optim.register_step_post_hook(lambda *_: None)
    return optim


def overridden(params: Any, **options: Any) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(params, **options)
    optim.step = optim.step  # type: ignore[method-assign]
    return optim


def overridden_below_a_scheduler(params: Any, **options: Any) -> torch.optim.Optimizer:
    optim = torch.optim.AdamW(params, **options)

    def step(self: torch.optim.AdamW, closure: Any = None) -> None:
        assert any(group["params"] for group in self.param_groups)
        torch.optim.AdamW.step(self, closure)

    optim.step = MethodType(step, optim)  # type: ignore[method-assign]
    torch.optim.lr_scheduler.StepLR(optim, 1)
    return optim


def boosted(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer], half: str, settings: dict[str, Any], **options: Any
) -> ZeroOptimizer:
    optim = make(groups_of(model), **{"lr": 1e-2, **options})
    return ZeroOptimizer(
        optim,
        model,
        ParallelMesh(),
        ZeroSettings(max_norm=0.5, bucket_size_in_m=700e-6, **settings),
        precision=PrecisionPolicy(half),
        scaler=ScalerConfig(initial_scale=2.0**10, growth_interval=3, hysteresis=1) if half == "fp16" else None,
    )


def trained(rank: int, world: int, zero: ZeroOptimizer, model: nn.Module, steps: int) -> dict[str, Tensor]:
    """A rate that moves at every step; one step overflows in fp16, one leaves out a module, and gradients are read
    after a step.
    """
    schedule = torch.optim.lr_scheduler.LambdaLR(zero.optim, lambda step: 0.8**step)
    share = SAMPLES // world
    seen = {}
    for number in range(steps):
        tokens = batch(number, 0)[rank * share : (rank + 1) * share]
        loss = loss_of(model, tokens, number != 2)
        zero.backward(loss * (1e30 if zero.scaler is not None and number == 1 else 1.0))
        zero.step()
        schedule.step()
        if number != 1:
            seen |= {f"gradient {number} {name}": grad.clone() for name, grad in zero.gradients().items()}
        zero.zero_grad()
    zero.gatherer.wait()
    for shard in zero.shards():
        seen[f"master {shard.name}"] = shard.master.clone()
        seen |= {f"{key} {shard.name}": value.clone() for key, value in shard.state.items()}
        seen |= {f"{key} {shard.name}": torch.as_tensor(value).clone() for key, value in shard.extra.items()}
    if zero.scaler is not None:
        seen["loss scale"] = zero.scaler.scale.clone()
    return seen | {name: param.detach().clone() for name, param in model.named_parameters()}


class Checked:
    """A kernel whose every step is compared with torch's fused one on copies."""

    def __init__(self, kernel: Kernel, rounds: bool) -> None:
        self.kernel, self.steps, self.skipped = kernel, 0, 0
        self.close = 0.0 if rounds else 2**-7  # Triton's interpreter cuts off

    def __call__(self, number: int, pieces: Sequence[Piece], rule: Rule, factor: Tensor, skip: Tensor | None) -> None:
        copies = [Piece(*(None if tensor is None else tensor.clone() for tensor in piece)) for piece in pieces]
        self.kernel(number, pieces, rule, factor, skip)
        self.steps += 1
        if skip is not None and bool(skip):
            self.skipped += 1
            for piece, copied in zip(pieces, copies, strict=True):
                assert torch.equal(torch.stack(piece[2:4]), torch.stack(copied[2:4]))
                assert torch.equal(piece.master, copied.master)
                assert torch.equal(piece.step, copied.step)
            return
        for piece, copied in zip(pieces, copies, strict=True):
            copied.step.add_(1)
            copied.grad.mul_(factor)
            step = torch._fused_adamw_ if rule.decoupled else torch._fused_adam_
            flat = [[tensor] for tensor in (copied.master, copied.grad, copied.exp_avg, copied.exp_avg_sq)]
            fields = {key: value for key, value in rule._asdict().items() if key != "decoupled"}
            step(*flat, [], [copied.step], amsgrad=False, **fields)
            for one, other in zip((piece.master, *piece[2:5]), (copied.master, *copied[2:5]), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
            if piece.weight is not None:
                expected = piece.master.to(piece.weight.dtype)
                torch.testing.assert_close(piece.weight, expected, rtol=self.close, atol=0.0)


def compare(
    rank: int, world: int, cases: list[tuple[str, dict[str, Any], dict[str, Any]]], kernel: str = "compiled"
) -> None:
    """Every step is torch's, weights reach all ranks, and a run is that of torch's own steps."""
    for half, settings, options in cases:
        found = []
        for on in (True, False):
            one_pass.LEAST_COMPILED = 0
            backends.INTERPRETED = on and kernel == "triton"
            model = Model()
            make = options.get("make", torch.optim.AdamW)
            rest = copy.deepcopy(
                {key: value for key, value in options.items() if key != "make"}
            )  # schedulers write rates
            zero = boosted(model, make, half, {**settings, "compiles": on and kernel == "compiled"}, **rest)
            assert zero._one_pass.name == (kernel if on else "")
            checked = Checked(zero._one_pass.kernel(), rounds=kernel != "triton") if on else None
            zero._one_pass._kernel = checked
            found.append(trained(rank, world, zero, model, 5))
            if checked is not None:
                assert checked.steps >= 5
                assert bool(checked.skipped) == (half == "fp16")
            zero.release()
        mine, theirs = found
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            assert (value.dtype, value.device) == (theirs[name].dtype, theirs[name].device)
            if half == "fp32" or name.startswith(("gradient 0", "step ", "loss scale")):
                torch.testing.assert_close(value, theirs[name], rtol=2e-5, atol=2e-6, msg=name)
            elif not name.startswith("gradient"):  # where a weight is rounded the other way, all that follows differs
                assert (value.float() - theirs[name].float()).norm() <= 0.05 * theirs[name].float().norm(), name


def compiled(rank: int, world: int) -> None:
    compiled_adam.backend = "eager"
    options = [{}, {"maximize": True}, {"make": HybridAdam}, {"lr": torch.tensor(1e-2)}]
    compare(rank, world, [("bf16", settings, {}) for settings in SETTINGS])
    compare(rank, world, [("fp32", {"stage": 2}, option) for option in options])
    counters.clear()
    compare(rank, world, [("bf16", {"stage": 1}, {"eps": 1e-7}), ("fp32", {"stage": 3}, {})])
    assert not counters["stats"]["unique_graphs"], "nothing is compiled anew"
    compare(rank, world, [("fp16", settings, {}) for settings in SETTINGS[3:]])
    assert counters["stats"]["unique_graphs"] <= 2


def test_compiled() -> None:
    run_ranks(compiled, 2, timeout=240)


def test_where_scripts_make_tensors_does_not_matter() -> None:
    """torch.set_default_device, of which the kernel's own numbers know nothing."""
    found = []
    for place in ("cpu", "meta"):
        piece = Piece(*(torch.full((1,), number) for number in (1.0, 0.5, 0.1, 0.2)), torch.zeros(()), None)
        with torch.device(place):
            rule = Rule(1e-2, 0.9, 0.95, 1e-8, 0.1, True, False)
            compiled_adam.CompiledAdam()(0, [piece], rule, torch.ones((), device="cpu"), None)
        found.append(piece.master)
    assert torch.equal(*found)
    kernels: Any = pytest.importorskip("shardwright.kernels.triton.adam")
    with torch.device("meta"):
        assert kernels._log(0.9) == pytest.approx(math.log(0.9), rel=1e-15)
        assert kernels._in_two(0.9) == (float(torch.tensor(0.9, device="cpu")), pytest.approx(0.0, abs=1e-7))
        assert kernels._table_of([(0,) * 6 + (4096,)], torch.device("cpu")).blocks.tolist() == [[0, 0], [0, 1]]


def declined(rank: int, world: int) -> None:
    one_pass.LEAST_COMPILED = 0
    cases: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
        (Own, {}),
        (torch.optim.SGD, {}),
        (hooked, {}),
        (overridden, {}),
        (overridden_below_a_scheduler, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
    ]
    for make, options in cases:
        model = Model()
        zero = boosted(model, make, "bf16", {"stage": 1, "compiles": True}, **options)
        assert zero._one_pass.kernel() is None, (make, options)
        trained(rank, world, zero, model, 2)
    for dtype, half, options in ((torch.float64, "fp32", {}), (torch.float32, "bf16", {"master_weights": False})):
        zero = boosted(Model(dtype), torch.optim.AdamW, half, {"stage": 1, "compiles": True, **options})
        assert bool(zero._one_pass.name) == (zero.buckets[0].master_dtype == torch.float32)
    one_pass.LEAST_COMPILED = 1_000_000
    assert not boosted(Model(), torch.optim.Adam, "bf16", {"stage": 1, "compiles": True})._one_pass.name
    one_pass.LEAST_COMPILED = 0
    one_pass.cpp_compiler = lambda: ("g++", False)
    assert not boosted(Model(), torch.optim.Adam, "bf16", {"stage": 1, "compiles": True})._one_pass.name
    one_pass.cpp_compiler = lambda: ("g++", True)
    zero = boosted(Model(), torch.optim.Adam, "bf16", {"stage": 1, "compiles": True})
    assert zero._one_pass.kernel() is not None
    zero.register_step_pre_hook(lambda *_: None)
    assert zero._one_pass.kernel() is None, "scripts may look at what is stepped on"


def test_whose_step_is_left_alone() -> None:
    run_ranks(declined, 1, timeout=60)


def test_an_overflow_leaves_gradients_at_the_scale_of_their_backward() -> None:
    """Where the kernel does not touch them."""
    run_ranks(read_after_steps, 1, timeout=120)


def read_after_steps(rank: int, world: int) -> None:
    compiled_adam.backend = "eager"
    one_pass.LEAST_COMPILED = 0
    model, plain = Model(), Model()
    zero = boosted(model, torch.optim.AdamW, "fp16", {"stage": 1, "compiles": True})
    assert zero.scaler is not None
    for number in range(3):  # the third clean step raises the scale
        zero.zero_grad()
        zero.backward(loss_of(model, batch(number, 0)))
        scale = float(zero.scaler.scale)
        zero.step()
        raised = float(zero.scaler.scale) / scale
        assert raised == (2.0 if number == 2 else 1.0)
        if number == 0:
            loss_of(plain, batch(number, 0)).backward()
            norm = nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.grad is not None], 0.5)
            assert zero.get_grad_norm() == pytest.approx(float(norm), rel=0.01)
            for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                if other.grad is not None:
                    torch.testing.assert_close(param.grad.float(), other.grad, rtol=2e-2, atol=2e-3, msg=name)
    clipped = zero.get_grad_norm(1.0)
    assert clipped == pytest.approx(sum(float(grad.abs().sum()) for grad in zero.gradients().values()), rel=1e-4)
    assert clipped < 100, "divided by the scale of the backward, not by the one that followed"
    zero.zero_grad()
