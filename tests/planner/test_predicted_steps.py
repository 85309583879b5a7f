"""Times that the search predicts, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwright.cli.plan import _lazy, _load, _optimizer
from shardwright.kernels.linear_cross_entropy import tokens_at_a_time
from shardwright.planner.candidate import Layout, Task, data_rounds
from shardwright.planner.estimate import Estimate, Estimator
from shardwright.planner.machines import machine
from shardwright.planner.operators import Operator
from shardwright.planner.profile import Part, Parts, Profile
from shardwright.planner.rates import rates
from shardwright.planner.remade import remade
from shardwright.planner.search import Question, Search
from shardwright.planner.states import StepCost, optimizer_costs
from shardwright.utils.device import chosen_as_for, planning_for
from shardwright.utils.streams import has_streams
from shardwright.zero.settings import ZeroSettings

PRODUCT = {Operator("product", 10**12, 10**6): 1.0}
TWICE = {Operator("product", 2 * 10**12, 10**6): 1.0}
LAYER = Part(1e9, 0.0, 1e8, 1e8, PRODUCT, TWICE)
HEAD_FLOPS = 5 * 10**12
DEVICE = machine("a100-80")


def estimated(rest: Part, world_size: int, step: StepCost | None = None, **changes: Any) -> Estimate:
    layout = Layout(**{"tp": 1, "pp": 1, "sp": 1, "dp": 1, "zero": 0, "style": "1f1b", "chunks": 1, **changes})
    found = rates(Profile({1: Parts((LAYER,), rest)}, (0,) * 16, 1, False), None, DEVICE, 1, layout.samples / layout.sp)
    flops = 3 * (found.layers * found.layer.flops + found.rest.flops) / found.samples
    task = Task(DEVICE, 1e6, True, 2, flops, world_size, *([] if step is None else [step]))
    return Estimator(task, found, layout).estimate(simulated=True)


def head(forward: float, backward: float) -> Part:
    calls = [
        {Operator("product", round(each * HEAD_FLOPS), 10**6): 1.0} if each else {} for each in (forward, backward)
    ]
    return Part(0.0, 0.0, 1e8, 1e8, *calls)


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(1, 2), (3, 0), (1, 3)],
    ids=["logits", "gradients beside the loss", "logits computed again"],
)
@pytest.mark.parametrize(
    ("pp", "style", "chunks"),
    [(pp, "1f1b", 1) for pp in range(1, 9)]
    + [(2, "interleaved", 2), (4, "interleaved", 2), (4, "zb", 1), (4, "zbv", 2)],
)
def test_model_flops_are_counted_once(forward: int, backward: int, pp: int, style: str, chunks: int) -> None:
    one = estimated(head(forward, backward), pp, pp=pp, style=style, chunks=chunks, samples=2, count=16)
    of_model = 3 * (16 * 10**12 + HEAD_FLOPS) * 2 * 16
    assert one.mfu == pytest.approx(of_model / (one.seconds * pp * DEVICE.flops))
    assert one.mfu < DEVICE.product


def test_model_flops_of_a_real_model_are_those_of_its_shapes() -> None:
    config = _load("llama-1b")
    length = 512
    question = Question(
        remade(lambda: _lazy(config)), lambda model: _optimizer("adamw", model), machine("h100"), 8, 8, length
    )
    hidden, inner, layers, vocabulary, keys = 2048, 8192, 16, 128256, 8 * 64
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inner
    attention = 2 * 2 * length * hidden / 2  # of a token, causal
    forward = length * (layers * (2 * layer + attention) + 2 * hidden * vocabulary)
    assert Search(question).model_flops == pytest.approx(3 * forward, rel=0.001)


def test_data_goes_round_as_often_as_the_runtime_sends_it() -> None:
    def rounds(**changes: Any) -> tuple[int, int]:
        return data_rounds(
            Layout(**{"tp": 1, "pp": 1, "sp": 1, "dp": 4, "style": "1f1b", "chunks": 1, "samples": 1, **changes})
        )

    assert [rounds(zero=stage, count=4) for stage in range(4)] == [(1, 0), (1, 1), (4, 1), (4, 8)]
    assert [rounds(zero=stage, count=4, pp=2) for stage in range(4)] == [(1, 0), (1, 1), (4, 1), (4, 1)]
    assert rounds(zero=3, count=4, dp=1, sp=2) == (4, 8)
    assert rounds(zero=3, count=4, dp=1) == (0, 0)


def test_ranks_that_share_sequences_gather_and_reduce_as_well() -> None:
    slow = [estimated(head(1, 2), 8, dp=dp, sp=sp, zero=3, samples=1, count=1) for dp, sp in ((8, 1), (1, 8))]
    layer = DEVICE.sent(2 * 1e8 * 7 / 8, 8, 8)
    assert slow[1].parts["data"] >= 16 * (layer - 1e12 / 8 / (DEVICE.flops * DEVICE.product)) > 0
    assert slow[1].parts["data"] > slow[0].parts["data"]  # less is computed meanwhile


def test_steps_take_as_long_as_their_optimizer_moves_and_computes() -> None:
    adam = estimated(head(1, 2), 1, samples=1, count=1)
    parameters = 16 * 1e8 + 1e8
    assert adam.parts["optimizer"] == pytest.approx(parameters * (4 + 8 + 16 + 2) / (DEVICE.bandwidth * DEVICE.moving))
    muon = estimated(head(1, 2), 1, StepCost(54.0, 1e5), samples=1, count=1)
    products = parameters * 1e5 / (DEVICE.flops * DEVICE.product)
    assert muon.parts["optimizer"] == pytest.approx(
        parameters * (54 + 2) / (DEVICE.bandwidth * DEVICE.moving) + products
    )


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["average"] = torch.zeros_like(param)
                param.add_(state["average"].lerp(param.grad, 0.1).sign_(), alpha=-group["lr"])
                state["average"].lerp_(param.grad, 0.01)


class AdamW8bit(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("for devices alone")


def test_what_a_step_keeps_and_moves_is_that_of_the_optimizer() -> None:
    params = [nn.Parameter(torch.ones(256, 512)), nn.Parameter(torch.ones(512, 512))]

    def costs(optimizer: torch.optim.Optimizer) -> tuple[float, StepCost]:
        return optimizer_costs(optimizer)

    assert costs(torch.optim.AdamW(params)) == (2.0, StepCost(0.0, 0.0))  # one pass of one kernel
    assert costs(torch.optim.SGD(params)) == (0.0, StepCost(12.0, 0.0))  # a gradient read, a weight read and written
    assert costs(torch.optim.SGD(params, momentum=0.9))[0] == 1.0
    kept, step = costs(Lion(params))
    assert kept == 1.0
    assert step.moved > 28
    rows = (256 + 512 + 512 + 512) / (256 * 512 + 512 * 512)
    assert costs(torch.optim.Adafactor(params))[0] == pytest.approx(rows)
    assert costs(AdamW8bit(params))[0] == pytest.approx((2 + 8 / 256) / 4)
    # five steps of Newton and Schulz, each three products of a matrix of m x n and one of m x m, m <= n
    m, n = 256, 512
    flops = 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n) / (m * n)
    assert costs(torch.optim.Muon(params[:1]))[1].flops == pytest.approx(flops)


def test_nobody_is_told_of_the_steps_that_are_tried() -> None:
    param = nn.Parameter(torch.ones(8))
    param.grad = torch.ones(8)
    optimizer = torch.optim.SGD([param], lr=0.1)
    told: list[int] = []
    optimizer.register_step_post_hook(lambda *_: told.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on the instance
    optimizer_costs(optimizer)
    assert not told
    assert param.tolist() == [1.0] * 8


def test_choices_are_those_of_the_devices_that_are_planned_for() -> None:
    here, settings = torch.device("cpu"), ZeroSettings()
    assert settings.bucket_numel("cpu") == 12_000_000
    with planning_for("cuda"):
        assert settings.bucket_numel("cpu") == 50_000_000
        assert tokens_at_a_time(here, 2**16) == 2**28 // (4 * 2**16)
        assert has_streams(here)
        with planning_for("cpu"):
            assert chosen_as_for(here) == "cpu"
    assert not has_streams(here)
    assert tokens_at_a_time(here, 2**16) == 2**24 // (4 * 2**16)
    with pytest.raises(ValueError, match="device_type='tpu' must be"), planning_for("tpu"):
        pass
