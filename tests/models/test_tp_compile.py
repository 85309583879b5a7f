"""Sharded decoder layers under torch.compile: one graph, and the numbers of one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from shardwright.ops import layer_graphs
from shardwright.ops.shared_grads import sync_shared_gradients
from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.testing import compare_models, run_ranks, zoo


class Layer(nn.Module):
    """A layer as its model calls it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.layer = model.model.layers[0]
        self.rotary = model.model.rotary_emb

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.layer(x, position_embeddings=self.rotary(x, positions), attention_mask=None, position_ids=positions)


def one_graph(rank: int, world_size: int, name: str) -> None:
    settings: dict[str, Any] = {"num_hidden_layers": 1, "dtype": torch.float32}
    reference, sharded = zoo.build(name, **settings), zoo.build(name, **settings)
    ShardFormer(ShardConfig()).optimize(sharded)
    plain, layer = Layer(reference), Layer(sharded)
    x = torch.randn(2, 7, reference.config.hidden_size, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(7)[None]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)  # raises where a graph would break
    gradients = []
    for one in (plain, compiled):
        given = x.clone().requires_grad_()
        y = one(given, positions)
        (y * torch.arange(y.numel()).view(y.shape).cos()).sum().backward()
        gradients.append((y.detach(), given.grad))
    sync_shared_gradients(layer.parameters(), dist.group.WORLD)
    for actual, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    compare_models(reference, sharded, coordinate=rank)


def test_a_sharded_decoder_layer_is_one_graph() -> None:
    run_ranks(one_graph, 2, "qwen3-causal-lm", timeout=110)


def compiled_by_the_option(rank: int, world_size: int, name: str) -> list[int]:
    """All-reduces of a step, with and without it."""
    layer_graphs.backend = "aot_eager"
    reference = zoo.build(name, dtype=torch.float32)
    batch = zoo.inputs(name, batch_size=2, seq_len=9, dtype=torch.float32)
    reference(**batch).loss.backward()
    counts = []
    for option in (False, True):
        model = zoo.build(name, dtype=torch.float32)
        ShardFormer(ShardConfig(enable_jit_fused=option)).optimize(model)
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            model(**batch).loss.backward()
        compare_models(reference, model, coordinate=rank)
        counts.append(all_reduce.call_count)
    return counts


def test_the_option_of_shard_config_sends_what_is_sent_without() -> None:
    for plain, compiled in run_ranks(compiled_by_the_option, 2, "llama-causal-lm", timeout=110):
        assert plain == compiled
