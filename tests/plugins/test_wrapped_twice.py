"""Plugins and optimizer wrappers that a script writes around those of the package."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.interface import ModelWrapper, OptimizerWrapper
from shardwright.plugins import DeepSpeedPlugin, LowLevelZeroPlugin, Plugin, TorchDDPPlugin
from shardwright.precision.scaler import ScalerConfig
from shardwright.testing import run_ranks


class Outer(LowLevelZeroPlugin):
    def configure(self, *args: Any, **kwargs: Any) -> Any:
        boosted = super().configure(*args, **kwargs)
        assert boosted.optimizer is not None
        return boosted._replace(optimizer=OptimizerWrapper(boosted.optimizer))


def train(kind: type[LowLevelZeroPlugin]) -> tuple[float | None, torch.Tensor, bool]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    booster = Booster(plugin=kind(stage=1, precision="fp16", initial_scale=256.0))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with booster.no_sync(boosted, optimizer):
        booster.backward(boosted(torch.ones(2, 6)).float().square().sum(), optimizer)
    booster.backward(boosted(torch.arange(12.0).view(2, 6)).float().square().sum(), optimizer)
    norm = optimizer.clip_grad_by_norm(1.0)
    assert optimizer.get_grad_norm() == pytest.approx(float(norm))
    optimizer.step()
    return float(norm), boosted.unwrap().weight.detach().clone(), optimizer.scaler is not None


def both(rank: int, world: int) -> None:
    plain, outer = train(LowLevelZeroPlugin), train(Outer)
    assert plain[0] == outer[0]
    assert torch.equal(plain[1], outer[1])
    assert plain[2]
    assert outer[2]


def test_a_wrapper_around_a_wrapper_answers_as_the_inner_one() -> None:
    run_ranks(both, 2)


class Returns(Plugin):
    returned: Any = None

    def configure(self, model: nn.Module, optimizer: Any = None, *rest: Any) -> Any:  # type: ignore[override]
        return type(self).returned(model, optimizer)

    def no_sync(self, model: nn.Module, optimizer: Any = None) -> Any:
        return nullcontext()

    def supported_precisions(self) -> list[str]:
        return ["fp32"]


def odd_values(rank: int, world: int) -> None:
    model = nn.Linear(2, 2)
    for returned in (lambda model, optimizer: (model, optimizer), lambda model, _: (model, None, None, None, None)):
        Returns.returned = staticmethod(returned)
        with pytest.raises(ValueError, match=r"Returns.configure returned tuple; it must return Boosted\("):
            Booster(plugin=Returns()).boost(model)
    Returns.returned = staticmethod(lambda model, optimizer: (ModelWrapper(model), None, None, None, None))
    Booster(plugin=Returns()).boost(nn.Linear(2, 2))
    for arguments, words in (
        ({"initial_scale": float("inf"), "max_scale": float("inf")}, "initial_scale=inf must be a number that fp32"),
        ({"initial_scale": 1e-60, "min_scale": 1e-60}, "initial_scale=1e-60 must be a number that fp32"),
        ({"growth_interval": 10**30}, "growth_interval=1000000000000000000000000000000 must be at most"),
        ({"hysteresis": 10**30}, "hysteresis=1000000000000000000000000000000 must be at most"),
    ):
        with pytest.raises(ValueError, match=words):
            ScalerConfig(**arguments)
    with pytest.raises(ValueError, match=r"bucket_cap_mb=inf.* must be more than 0"):
        TorchDDPPlugin(bucket_cap_mb=float("inf"))
    with pytest.raises(ValueError, match="reduce_bucket_size_in_m=inf must be positive"):
        LowLevelZeroPlugin(reduce_bucket_size_in_m=float("inf"))
    for config, words in (
        (3, "config=3 must be a ds_config"),
        ({"bf16": True}, r"config\['bf16'\]=True must be a tab"),
    ):
        with pytest.raises(ValueError, match=words):
            DeepSpeedPlugin(config)  # type: ignore[arg-type]
    model = nn.Linear(2, 2)
    booster = Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16")
    _, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="copying or pickling a boosted optimizer"):
        copy.deepcopy(optimizer)


def test_odd_values_are_named() -> None:
    run_ranks(odd_values, 1)
