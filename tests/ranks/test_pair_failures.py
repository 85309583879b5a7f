"""A failure in either half of a pair ends the other half and the other ranks, says whose it is, and can be recovered
from.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from failure_jobs import batch_of, join

import shardwright
from shardwright.booster import Booster
from shardwright.comm import turns
from shardwright.comm.turns import BACKWARD_THREAD
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo


class _Run:
    """A tiny Llama in pairs; a layer of this rank fails in the half that `fails` names, the first time that it runs
    beside another.
    """

    def __init__(self) -> None:
        self.fails = ""
        plugin = HybridParallelPlugin(
            precision="fp32", tp_size=2, pp_size=2, num_microbatches=5, pp_style="dualpipev", num_model_chunks=2
        )
        self.booster = Booster(plugin=plugin)
        model = zoo.build("llama-causal-lm", num_hidden_layers=4)
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for module in self.model.unwrap().modules():
            if type(module).__name__.endswith("LlamaDecoderLayer") and any(True for _ in module.parameters()):
                module.register_forward_hook(self._after_forward)

    def _after_forward(self, _: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if self.fails == "forward":
            self._fail()
        elif self.fails == "backward":
            hidden.register_hook(lambda _: self._fail())

    def _fail(self) -> None:
        if turns._pass_on is not None:
            raise ValueError(f"in {self.fails}")

    def step(self, number: int) -> None:
        batch = batch_of(number, seq_len=9 + number)
        self.booster.execute_pipeline(iter([batch]), self.model, lambda outputs, _: outputs.loss, self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.unwrap().parameters()]


def _fails(rank: int, world: int) -> list[str]:
    join(rank, world)
    untouched, run = _Run(), _Run()
    said = []
    for number, (where, failing) in enumerate([("forward", 1), ("backward", 2)]):
        untouched.step(number)
        run.fails = where if rank == failing else ""
        told = ""
        try:
            run.step(number)
        except (ValueError, RuntimeError) as error:
            told = str(error)
            shardwright.recover(timeout=20)
        said.append(told)
        run.optimizer.zero_grad()
        run.fails = ""
        run.step(number)
    for one, other in zip(run.weights(), untouched.weights(), strict=True):
        assert torch.equal(one, other)
    assert [thread.name for thread in threading.enumerate()].count(BACKWARD_THREAD) <= 2, "one per model"
    return said


def test_a_failure_in_either_half_is_told_and_recovered_from() -> None:
    results = run_ranks(_fails, 4, debug="OFF")
    for forward, backward in results:
        assert "in forward" in forward, forward
        assert "in backward" in backward, backward
    assert "F" in (action := results[1][0].split("action ")[1].split()[0]), action
    assert f"({action}; <-- ERROR HERE" in results[1][0], results[1][0]
    assert "B" in (action := results[2][1].split("action ")[1].split()[0]), action
    assert f"{action}) <-- ERROR HERE" in results[2][1], results[2][1]
