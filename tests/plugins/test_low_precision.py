"""Pipelines in half precision: what stands for absent parameters has the dtype that these work in, or models mix
dtypes.
"""

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


@pytest.mark.parametrize(
    "arguments", [{"precision": "bf16"}, {"precision": "bf16", "zero_stage": 3}, {"precision": "fp16"}], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_a_pipeline_in_half_precision_comes_near_one_process_in_fp32(name: str, arguments: dict[str, Any]) -> None:
    expected = run_ranks(losses, 1, name, {"precision": "fp32"})[0]
    assert run_ranks(losses, 2, name, arguments)[-1] == pytest.approx(expected, rel=2e-2)


def of_float_inputs(rank: int, world: int, arguments: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses of execute_pipeline and of plain transformers in the same format, on images in fp32."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[arguments["precision"]]
    plain, model = (
        zoo.build("vit-image-classification", dtype=dtype),
        zoo.build("vit-image-classification", dtype=torch.float32),
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    booster = Booster(plugin=HybridParallelPlugin(num_microbatches=2, **arguments))
    model, optimizer, *_ = booster.boost(model, optimizer)
    targets = []

    def to_target(outputs: Any, inputs: Any) -> torch.Tensor:
        if not inputs["pixel_values"].is_meta:
            targets.append(inputs["pixel_values"].dtype)
        return (outputs.logits.float() - inputs["pixel_values"].mean((1, 2, 3))[:, None]).square().mean()

    seen, expected = [], []
    batch = zoo.inputs("vit-image-classification", batch_size=5, dtype=torch.float32)
    for criterion in (lambda outputs, inputs: outputs.loss, to_target):
        result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
        optimizer.zero_grad()
        if result["loss"] is not None:
            seen.append(float(result["loss"]))
            given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
            expected.append(float(criterion(plain(**given), batch)))
    assert all(kind == torch.float32 for kind in targets), "a criterion sees the batch as it is"
    return seen, expected


@pytest.mark.parametrize(
    "arguments", [{"precision": "bf16"}, {"precision": "fp16"}, {"precision": "bf16", "pp_size": 2}], ids=str
)
def test_float_inputs_come_in_the_format_that_the_model_works_in(arguments: dict[str, Any]) -> None:
    seen, expected = run_ranks(of_float_inputs, arguments.get("pp_size", 1), arguments)[-1]
    assert len(seen) == 2
    assert seen == pytest.approx(expected, rel=1e-2)
