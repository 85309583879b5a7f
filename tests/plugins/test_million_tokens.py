"""A sequence of a million tokens over 64 ranks: what the plan says of a rank is what its part leaves and sends.

One rank's part of it runs in its true shapes without data, forward and backward, through the attention of the mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sequence_ranks import Sent
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import shardwright
from shardwright.attention.sequence_modes import name_attention
from shardwright.lazy import LazyInitContext
from shardwright.models.dry_run import without_data
from shardwright.pipeline.saved_bytes import measure
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.resolved import ResolvedLayout
from shardwright.plugins.hybrid.sequence import ring_attention

TOKENS, RANKS = 2**20, 64


@pytest.fixture
def job() -> Iterator[None]:
    shardwright.launch(0, RANKS, None, None, backend="fake")
    yield
    dist.destroy_process_group()


def config(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=TOKENS,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )


def planned(plugin: HybridParallelPlugin, layers: int) -> ResolvedLayout:
    with LazyInitContext():
        model = LlamaForCausalLM(config(layers))
    return plugin.preflight(model, None, 1, TOKENS)


@pytest.mark.parametrize("special", [{}, {"ulysses_size": 8}], ids=["ring", "ulysses in a ring"])
def test_a_rank_keeps_and_sends_what_the_plan_says(job: None, special: dict[str, Any]) -> None:
    mode = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn", "sp_size": RANKS}
    plugin = HybridParallelPlugin(**mode, **special)
    one, two = planned(plugin, 1), planned(plugin, 2)
    rows = [(row.count, row.sent) for row in one.traffic if row.axis == "sp"]
    assert rows == [(row.count // 2, row.sent // 2) for row in two.traffic if row.axis == "sp"]

    group = plugin.sp_group
    on_cpu = group._get_backend(torch.device("cpu"))
    group._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, on_cpu)
    share, attention = ring_attention(plugin.settings, plugin.mesh, causal=True)
    assert sum(stop - start for start, stop in share.spans(TOKENS)) == TOKENS // RANKS
    with without_data(), Sent(0) as sent:
        layer = LlamaDecoderLayer(config(1), 0).to(torch.bfloat16)
        name_attention(attention, "meta", [layer])
        x = torch.empty(1, TOKENS // RANKS, 4096, dtype=torch.bfloat16, requires_grad=True)
        turn = torch.empty(1, TOKENS // RANKS, 128, dtype=torch.bfloat16)
        rotary = turn, turn.clone()
        with measure([*layer.parameters(), *rotary]) as saved:
            y = layer(x, position_embeddings=rotary, attention_mask=None)
        y.backward(torch.empty_like(y))
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert saved.bytes == two.activations[0] - one.activations[0]
    assert [(calls, 2 * numbers) for calls, numbers in sent.found.values()] == rows
