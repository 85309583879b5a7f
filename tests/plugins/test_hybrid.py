"""Layouts of HybridParallelPlugin against one process: loss, every gradient, every updated weight."""

from __future__ import annotations

import pytest
from hybrid_ranks import Layout, run_layout

from shardwright.testing import run_ranks

LAYOUTS = [
    Layout("llama-causal-lm", 1),
    Layout("llama-causal-lm", 2, {"tp_size": 2}),
    Layout("llama-causal-lm", 2, {"zero_stage": 1}),
    Layout("llama-causal-lm", 2, {"pp_size": 2, "num_microbatches": 3}),
    Layout("llama-tied-causal-lm", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 4}, max_norm=0.1),
    Layout("llama-tied-causal-lm", 4, {"pp_size": 2, "num_microbatches": 3, "zero_stage": 1}, max_norm=0.1, accumulate=2),
    Layout("llama-tied-causal-lm", 4, {"pp_size": 2, "num_microbatches": 3, "zero_stage": 2}, max_norm=0.1, accumulate=2),
    Layout("llama-tied-causal-lm", 4, {"pp_size": 2, "num_microbatches": 3, "zero_stage": 3}, max_norm=0.1, accumulate=2),
    Layout("llama-causal-lm", 4, {"tp_size": 2, "zero_stage": 3}, max_norm=0.1),
    Layout("gpt2-causal-lm", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb"}, max_norm=0.1),
    Layout("bert-masked-lm", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2}),
    Layout("t5-conditional-generation", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 3}, checkpointing=True),
    Layout("qwen3-moe-causal-lm", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 3, "pp_style": "zbv", "num_model_chunks": 2}),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout)
