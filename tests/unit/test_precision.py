"""The loss scaler's walk, the norm's accuracy, the names of torch's fused optimizers, and what wrappers answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.checkpoint.optimizer_parts import parts_of_optimizer
from shardwright.checkpoint.position import Position
from shardwright.interface import OptimizerWrapper
from shardwright.optim import CPUAdam, FusedAdam, HybridAdam
from shardwright.optim.kind import choose_fused, is_elementwise
from shardwright.precision.grad_norm import clip_coefficient, power_sum, total_norm
from shardwright.precision.policy import PrecisionPolicy
from shardwright.precision.scaler import DynamicScaler, ScalerConfig

CPU = torch.device("cpu")


def walk(scaler: DynamicScaler, overflows: str) -> list[float]:
    scales = []
    for overflow in overflows:
        scaler.update(torch.tensor(float(overflow)))
        scales.append(float(scaler.scale))
    return scales


def test_scale_falls_after_patience_and_grows_after_clean_steps() -> None:
    scaler = DynamicScaler(
        ScalerConfig(initial_scale=8, growth_interval=3, hysteresis=2, min_scale=2, max_scale=16), CPU
    )
    #                        forgiven, lowered, lowered, at the floor, three clean: grown, patience restored
    assert walk(scaler, "1111000" + "1000" + "000000") == [8, 4, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8, 16, 16, 16, 16]
    assert scaler.skipped_steps == 5


def test_scaler_state_round_trip() -> None:
    one = DynamicScaler(ScalerConfig(growth_interval=3), CPU)
    walk(one, "1100")
    two = DynamicScaler(ScalerConfig(growth_interval=3), CPU)
    two.load_state_dict(one.state_dict())
    assert walk(one, "01100") == walk(two, "01100")
    assert two.skipped_steps == one.skipped_steps


@pytest.mark.parametrize(
    "bad",
    [
        {"min_scale": 0},
        {"initial_scale": 2.0**40},
        {"growth_factor": 0.5},
        {"backoff_factor": 2},
        {"growth_interval": 0},
        {"hysteresis": 0},
    ],
)
def test_scaler_settings_are_checked(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ScalerConfig(**bad)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_norm_is_that_of_torch(norm_type: float) -> None:
    grads = [torch.randn(n, dtype=torch.float64) for n in (3, 256, 1000)]
    norm = total_norm(power_sum(grads, CPU, norm_type), None, norm_type)
    torch.testing.assert_close(norm, torch.cat(grads).norm(norm_type), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_many_elements_is_accurate(dtype: torch.dtype) -> None:
    grad = torch.randn(3_000_001).to(dtype)
    norm = total_norm(power_sum([grad], CPU), None)
    assert float(norm / grad.double().norm() - 1) == pytest.approx(0, abs=1e-7)


def test_norm_of_a_cut_tensor_is_the_same_bit_by_bit() -> None:
    grad = torch.randn(256 * 64)
    whole = power_sum([grad], CPU).float()
    assert torch.equal(power_sum(grad.chunk(4), CPU).float(), whole)


def test_clipping_is_that_of_torch() -> None:
    param = nn.Parameter(torch.zeros(7))
    param.grad = torch.randn(7)
    expected = param.grad * clip_coefficient(param.grad.norm(), 0.1)
    nn.utils.clip_grad_norm_([param], 0.1)
    assert torch.equal(param.grad, expected)


def test_fp32_raises_half_and_keeps_double() -> None:
    model = nn.ParameterList([torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.float64)])
    assert PrecisionPolicy("fp32").dtypes(model) == {"0": torch.float32, "1": torch.float64}


def test_inputs_are_cast_where_they_are_floats() -> None:
    batch = {"x": torch.zeros(1), "ids": torch.zeros(1, dtype=torch.long), "flag": True}
    cast = PrecisionPolicy("bf16").cast_inputs(batch)
    assert (cast["x"].dtype, cast["ids"].dtype, cast["flag"]) == (torch.bfloat16, torch.long, True)
    assert PrecisionPolicy("fp32").cast_inputs(batch) is batch


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_buffers_that_a_model_names_stay_in_fp32(precision: str) -> None:
    """As the bias that corrects which experts DeepSeek-V3 chooses, whose steps bf16 would round away."""

    class Router(nn.Module):
        _keep_in_fp32_modules_strict = ["correction"]

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("correction", torch.linspace(1, 1.001, 8))
            self.register_buffer("other_correction", torch.ones(8))

    model = nn.Sequential(Router())
    outer, inner = PrecisionPolicy(precision), Router()
    outer.cast_buffers(model)
    outer.cast_buffers(inner)
    assert torch.equal(model[0].correction, torch.linspace(1, 1.001, 8))
    assert inner.correction.dtype == torch.float32
    assert model[0].other_correction.dtype == inner.other_correction.dtype == outer.dtype


@pytest.mark.parametrize(
    ("cls", "plain"), [(HybridAdam, torch.optim.AdamW), (CPUAdam, torch.optim.AdamW), (FusedAdam, torch.optim.AdamW)]
)
def test_named_optimizers_are_adamw(cls: type, plain: type) -> None:
    params = [nn.Parameter(torch.randn(5)) for _ in range(2)]
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    ours, theirs = cls(params, lr=0.1, weight_decay=0.1), plain(copies, lr=0.1, weight_decay=0.1, fused=True)
    for _ in range(3):
        for one, two in zip(params, copies, strict=True):
            one.grad = torch.randn(5)
            two.grad = one.grad.clone()
        ours.step()
        theirs.step()
    for one, two in zip(params, copies, strict=True):
        assert torch.equal(one, two)


def test_adamw_mode_off_is_adam() -> None:
    param = nn.Parameter(torch.ones(3))
    copy = nn.Parameter(torch.ones(3))
    param.grad = copy.grad = torch.full((3,), 0.5)
    HybridAdam([param], weight_decay=0.1, adamw_mode=False).step()
    torch.optim.Adam([copy], weight_decay=0.1, fused=True).step()
    assert torch.equal(param, copy)


def test_what_optimizers_cannot_honour_is_refused() -> None:
    params = [nn.Parameter(torch.zeros(1))]
    for call in (
        lambda: HybridAdam(params, bias_correction=False),
        lambda: HybridAdam(params, nvme_offload_fraction=0.5),
        lambda: FusedAdam(params, set_grad_none=False),
        lambda: CPUAdam([nn.Parameter(torch.zeros(1, device="meta"))]),
    ):
        with pytest.raises(ValueError):
            call()


class OwnStep(torch.optim.AdamW):
    def step(self, closure: object = None) -> None:
        """Looks at the norm of each matrix."""


class Declared(OwnStep):
    elementwise = True


class Renamed(torch.optim.AdamW):
    pass


def test_which_optimizers_may_see_pieces() -> None:
    params = [nn.Parameter(torch.zeros(2, 2))]
    cases = {torch.optim.SGD: True, Renamed: True, OwnStep: False, Declared: True, HybridAdam: True}
    for cls, expected in cases.items():
        assert is_elementwise(cls(params, lr=0.1)) == expected, cls
    assert not is_elementwise(torch.optim.Muon(params))
    assert not is_elementwise(torch.optim.Adafactor(params))


def test_fused_is_chosen_only_where_the_user_left_it_open() -> None:
    params = [nn.Parameter(torch.zeros(2))]
    assert choose_fused(torch.optim.AdamW(params), CPU)
    assert not choose_fused(torch.optim.AdamW(params, foreach=True), CPU)
    assert not choose_fused(torch.optim.AdamW(params, fused=False), CPU)
    assert not choose_fused(torch.optim.RMSprop(params), CPU)


class _OwnMasters(OptimizerWrapper):
    """Answers for its shards by itself."""

    @property
    def sharded(self) -> Any:
        return self


def test_the_wrapper_with_masters_of_its_own_answers_for_them_through_others() -> None:
    model = nn.Linear(2, 3)
    plain = OptimizerWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    own = _OwnMasters(torch.optim.SGD(model.parameters(), lr=0.1))
    assert parts_of_optimizer(OptimizerWrapper(own), model, Position()) is own
    assert plain.sharded is None
    parts = parts_of_optimizer(OptimizerWrapper(plain), model, Position())
    assert [(shard.name, shard.local_shape) for shard in parts.shards()] == [("weight", (3, 2)), ("bias", (3,))]
    with plain.no_sync():
        plain.backward(model(torch.ones(1, 2)).sum())
    plain.require_cleared()
    assert plain.scaler is None
    assert plain.require_sync
