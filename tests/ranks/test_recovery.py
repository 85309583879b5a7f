"""Training goes on after `shardwright.recover()` as if nothing had failed, or is refused on every rank where it
could not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from failure_jobs import batch_of, join

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import BrokenJobError
from shardwright.cluster.job import JobError
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from shardwright.testing import run_ranks, zoo

STEPS = 3


class _Run:
    """A tiny Llama under AdamW, whose last decoder layer on this rank, or whose optimizer, fails when `fails` says
    so.
    """

    def __init__(self, plugin: Any) -> None:
        self.fails = ""
        self.plugin = plugin
        self.pipeline = getattr(plugin, "pp_size", 1) > 1
        self.booster = Booster(plugin=plugin)
        model = zoo.build("llama-causal-lm", num_hidden_layers=4)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self._step, optimizer.step = optimizer.step, self._fail_or_step
        self.model, self.optimizer, *_ = self.booster.boost(model, optimizer)
        layers = [
            module for module in self.model.unwrap().modules() if type(module).__name__.endswith("LlamaDecoderLayer")
        ]
        held = [layer for layer in layers if any(True for _ in layer.parameters())]
        held[-1].register_forward_hook(self._after_forward)

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        if self.fails == "forward":
            raise ValueError("in forward")
        hidden = output[0] if isinstance(output, tuple) else output
        if self.fails == "backward" and hidden.requires_grad:
            hidden.register_hook(self._in_backward)

    def _in_backward(self, _: torch.Tensor) -> None:
        raise ValueError("in backward")

    def _fail_or_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.fails == "optimizer":
            raise ValueError("in optimizer")
        return self._step(*args, **kwargs)

    def step(self, number: int) -> None:
        count, place = self.plugin.data_parallel
        # new shapes every time
        batch = {name: value.chunk(count)[place] for name, value in batch_of(number, seq_len=9 + number).items()}
        if self.fails == "data":
            raise ValueError("in data")
        if self.pipeline:
            self.booster.execute_pipeline(iter([batch]), self.model, lambda outputs, _: outputs.loss, self.optimizer)
        else:
            self.booster.backward(self.model(**batch).loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.unwrap().parameters()]


def _never_failed(plugin: Callable[[], Any]) -> list[torch.Tensor]:
    run = _Run(plugin())
    for number in range(STEPS):
        run.step(number)
    return run.weights()


def _recovered(rank: int, world: int, plugin: Callable[[], Any], where: str, tmp: str) -> None:
    """The second step fails on the last rank, and is taken again."""
    expected = _never_failed(plugin)
    run = _Run(plugin())
    for number in range(STEPS):
        if number == 1:
            run.fails = where if rank == world - 1 else ""
            told = ""
            try:
                run.step(number)
            except (ValueError, RuntimeError) as error:
                told = str(error)
                shardwright.recover(timeout=20)
            assert f"in {where}" in told, told  # the first failure's words, on all ranks
            run.optimizer.zero_grad()
            run.fails = ""
        run.step(number)
    for mine, whole in zip(run.weights(), expected, strict=True):
        torch.testing.assert_close(mine, whole, atol=1e-6, rtol=0)
    run.booster.save(tmp, run.model, run.optimizer)  # ranks had come differently far in counting such calls, too


def _pipeline(**style: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(precision="fp32", pp_size=2, num_microbatches=2, **style)


def _recover_in_the_middle(rank: int, world: int, tmp: str) -> None:
    join(rank, world)
    _recovered(rank, world, lambda: _pipeline(pp_style="zbv", num_model_chunks=2), "backward", f"{tmp}/0")
    _recovered(rank, world, lambda: LowLevelZeroPlugin(stage=3, precision="fp32"), "backward", f"{tmp}/1")
    _recovered(rank, world, lambda: LowLevelZeroPlugin(stage=3, precision="fp32"), "forward", f"{tmp}/2")


def test_steps_are_undone_that_failed_in_their_middle(tmp_path: Any) -> None:
    run_ranks(_recover_in_the_middle, 2, str(tmp_path), debug="OFF", timeout=60)


def _recover_from_all(rank: int, world: int, tmp: str) -> str:
    join(rank, world)

    _recovered(rank, world, TorchDDPPlugin, "backward", f"{tmp}/0")
    _recovered(rank, world, _pipeline, "data", f"{tmp}/1")
    _recovered(rank, world, lambda: LowLevelZeroPlugin(stage=2, precision="bf16"), "forward", f"{tmp}/2")
    run = _Run(LowLevelZeroPlugin(stage=1, precision="fp32"))
    run.fails = "optimizer" if rank == 1 else ""
    try:
        run.step(0)
    except (ValueError, RuntimeError):
        with pytest.raises(BrokenJobError) as refused:
            shardwright.recover(timeout=20)
        return str(refused.value)
    return ""


def test_training_after_recovery_is_that_which_never_failed(tmp_path: Any) -> None:
    for text in run_ranks(_recover_from_all, 2, str(tmp_path), debug="OFF", timeout=60):
        assert "rank(s) [0, 1] had begun to change weights" in text
        assert "last checkpoint" in text


def _refuse_fsdp(rank: int, world: int) -> list[str]:
    join(rank, world)
    told = []
    run = _Run(TorchFSDPPlugin())
    run.step(0)
    run.fails = "forward" if rank == 1 else ""
    try:
        run.step(1)
    except (ValueError, RuntimeError):
        for call in (lambda: shardwright.recover(timeout=20), run.optimizer.step):
            with pytest.raises(BrokenJobError) as refused:
                call()
            told.append(str(refused.value))
    return told


def test_what_fsdp_cannot_forget_is_refused_on_every_rank() -> None:
    for recovering, stepping in run_ranks(_refuse_fsdp, 2, debug="OFF", timeout=60):
        assert "TorchFSDPPlugin" in recovering
        assert "last checkpoint" in recovering
        assert "in forward" in stepping
        assert "recover()" not in stepping  # advice that could not be followed


def _come_late(rank: int, world: int) -> str:
    join(rank, world)
    run = _Run(TorchDDPPlugin())
    run.step(0)
    run.fails = "data" if rank == 1 else ""
    try:
        if rank == 0:
            time.sleep(2)  # the groups are closed meanwhile
        run.step(1)
    except ValueError:
        shardwright.recover(timeout=20)
    except JobError as error:
        shardwright.recover(timeout=20)
        return str(error)
    return ""


def test_a_late_rank_under_ddp_hears_the_story() -> None:
    assert "rank 1 (dp=1) failed first: ValueError: in data" in run_ranks(_come_late, 2, debug="OFF", timeout=60)[0]
