"""Pipelines in half precision: what stands for absent parameters has the dtype that these work in, or models mix dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo

MODELS = ("llama-tied-causal-lm", "gpt2-causal-lm", "t5-conditional-generation", "bert-masked-lm")


def losses(rank: int, world: int, name: str, arguments: dict[str, Any]) -> list[float]:
    model = zoo.build(name, dtype=torch.float32)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=world, num_microbatches=2, max_norm=1.0, **arguments))
    model, optimizer, *_ = booster.boost(model, optimizer)
    seen = []
    for step in range(3):
        batch = zoo.inputs(name, batch_size=4, seed=step)
        result = booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if result["loss"] is not None:
            seen.append(float(result["loss"]))
    return seen


@pytest.mark.parametrize("arguments", [{"precision": "bf16"}, {"precision": "bf16", "zero_stage": 3}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_in_half_precision_comes_near_one_process_in_fp32(name: str, arguments: dict[str, Any]) -> None:
    expected = run_ranks(losses, 1, name, {"precision": "fp32"})[0]
    assert run_ranks(losses, 2, name, arguments)[-1] == pytest.approx(expected, rel=2e-2)
