"""Operators in one under HybridParallelPlugin: steps of whole layouts against one process, and what is said of
them.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from hybrid_ranks import Layout, run_layout
from torch import nn

from shardwright.kernels import linear_cross_entropy
from shardwright.logging import get_dist_logger
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.testing import run_ranks, zoo

FUSED: dict[str, Any] = {
    "enable_fused_activation": True,
    "enable_fused_rotary": True,
    "enable_fused_normalization": True,
}
LAYOUTS = [
    Layout("llama-causal-lm", 2, {"tp_size": 2, **FUSED}, checkpointing=True),
    Layout(
        "qwen3-moe-causal-lm",
        2,
        {"pp_size": 2, "num_microbatches": 2, "pp_style": "zb", "zero_stage": 1, **FUSED},
    ),
    Layout("t5-gated-conditional-generation", 2, {"zero_stage": 3, **FUSED}),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def said(rank: int, world: int) -> list[str]:
    heard = _Heard()
    get_dist_logger().logger.addHandler(heard)
    for name in ("llama-causal-lm", "gpt2-causal-lm"):
        model = zoo.build(name, dtype=torch.float32)
        ShardFormer(ShardConfig(enable_all_optimization=True, enable_tensor_parallelism=False)).optimize(model)
    model = zoo.build("llama-causal-lm", dtype=torch.float32)
    linear_cross_entropy.CHUNK_BYTES["cpu"] = 4 * 101 * 4
    for batch, sequence in ((4, 8), (1, 3), (None, None)):
        heard.messages.append(HybridParallelPlugin(precision="fp32").preflight(model, None, batch, sequence).kernels)
    layout = HybridParallelPlugin(precision="fp32", num_microbatches=2, **FUSED).preflight(model, None, 4, 8)
    heard.messages.append(layout.kernels)
    off = HybridParallelPlugin(precision="fp32", enable_fused_cross_entropy=False)
    heard.messages.append(off.preflight(model, None, 4, 8).kernels)
    heard.messages.append(HybridParallelPlugin(precision="fp32").preflight(nn.Linear(2, 2)).kernels)
    return heard.messages


def test_what_is_said() -> None:
    [messages] = run_ranks(said, 1)
    llama, gpt2 = (text for text in messages if "enable_all_optimization=True turned on" in text)
    on, off = llama.split("; not turned on: ")
    assert on.endswith("norms fused (torch), gated activations fused (torch), rotary positions fused (torch)")
    assert off.startswith("compiled layers (enable_jit_fused=True")
    assert "attention sdpa" in gpt2
    assert "not turned on: norms (are one kernel each already, and stay), gated activations (are none" in gpt2
    assert messages[-6:] == [
        "cross entropy fused over 8 chunks",
        "cross entropy of whole logits (3 tokens are no more than a chunk of 4)",
        "cross entropy fused (4 tokens at a time)",
        "norms fused (torch), gated activations fused (torch), rotary positions fused (torch), "
        "cross entropy fused over 4 chunks",
        "",
        "",
    ]
