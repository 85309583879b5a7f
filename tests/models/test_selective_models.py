"""Selective recomputation of HuggingFace layers on one process: numbers, products that run twice, and bytes against
those counted.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.models.layer_chain import find_units
from shardwright.ops.keeping import is_dear
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.pipeline.cut.activations import count_activations
from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.saved_bytes import measure
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import keep_float64, zoo

GROUPED = {"experts_implementation": "grouped_mm"}
EAGER = {"attn_implementation": "eager"}
ALL = PipelineGradientCheckpointConfig(selective_ratio=1.0)
WHOLE = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)


class CountDear(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rpartition(".")[0]
        self.calls += is_dear(name) and "backward" not in name
        return func(*args, **(kwargs or {}))


def build(name: str, dropout: bool, **overrides: Any) -> nn.Module:
    model = zoo.build(name, **overrides)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2 if dropout else 0.0
    return model.train()


def step(
    model: nn.Module, batch: Any, config: PipelineGradientCheckpointConfig | None
) -> tuple[list[torch.Tensor], int]:
    """Loss, gradients and weights after a step of SGD, and the products that ran; without a config plain
    transformers and torch.
    """
    torch.manual_seed(11)
    with CountDear() as count:
        if config is None:
            loss = model(**batch).loss
            loss.backward()
        else:
            settings = PipelineSettings(gradient_checkpoint_config=config)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            executor = PipelineExecutor(cut_model(model, settings), settings)
            loss = executor.execute(iter([batch]), lambda outputs, inputs: outputs.loss, optimizer)["loss"]
    grads = [param.grad.clone() if param.grad is not None else torch.zeros(()) for param in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [loss.detach(), *grads, *(param.detach() for param in model.parameters())], count.calls


@pytest.mark.parametrize(
    ("name", "dropout", "overrides"),
    [
        ("llama-causal-lm", False, {}),
        ("llama-causal-lm", False, EAGER),
        ("gpt2-causal-lm", True, {}),
        ("gpt2-causal-lm", True, EAGER),
        ("mixtral-causal-lm", False, {"experts_implementation": "batched_mm"}),
        ("qwen3-moe-causal-lm", False, {"experts_implementation": "eager"}),
        ("qwen3-moe-causal-lm", False, GROUPED),
        ("bert-masked-lm", True, {}),
        ("bert-masked-lm", True, EAGER),
        ("t5-conditional-generation", True, {}),
    ],
)
def test_numbers_are_those_of_plain_transformers(name: str, dropout: bool, overrides: dict[str, Any]) -> None:
    dtype = torch.float32 if overrides == GROUPED else torch.float64  # grouped products have no double precision
    batch = zoo.inputs(name, batch_size=3, seq_len=11, dtype=dtype)
    with keep_float64() if dtype is torch.float64 else nullcontext():
        (expected, plain), (found, kept), (_, again) = (
            step(build(name, dropout, dtype=dtype, **overrides), batch, config) for config in (None, ALL, WHOLE)
        )
    close = 1e-10 if dtype == torch.float64 else 1e-5
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=close, atol=close)
    assert kept == plain < again


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("llama-causal-lm", {}),
        ("gpt2-causal-lm", {}),
        ("mixtral-causal-lm", GROUPED),
        ("qwen3-moe-causal-lm", {"experts_implementation": "batched_mm"}),
        ("bert-masked-lm", {}),
    ],
)
def test_kept_bytes_are_those_that_are_counted(name: str, overrides: dict[str, Any]) -> None:
    """And lie between those of whole recomputation and of none."""
    found = []
    batch = zoo.inputs(name, batch_size=3, seq_len=32, dtype=torch.float32)
    for config in (WHOLE, ALL, None):
        model = build(name, False, **overrides).float()
        units = find_units(model)
        cut = cut_model(model, PipelineSettings(gradient_checkpoint_config=config))
        with measure([*model.parameters(), *model.buffers()]) as saved:
            cut.staged.run(0, None, batch)
        whole, in_part = cut.staged.checkpointed.of(0)
        [counted], _ = count_activations(model, units, batch).by_stage([range(len(units))], [whole], [in_part])
        if config is not WHOLE:  # next to whole layers masks and positions weigh
            assert saved.bytes == pytest.approx(counted, rel=0.03)
        found.append(saved.bytes)
    assert found == sorted(found)
    assert found[0] < 0.7 * found[1]
