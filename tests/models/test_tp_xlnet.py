"""XLNet, whose attention has parameters in the place of linears, and two streams: against plain transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import XLNetConfig, XLNetLMHeadModel

from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.spec import get_spec
from shardwright.testing import compare_models, keep_float64, run_ranks

TOKENS, ROWS = 8, 3


def made(heads: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "d_model": 12 * heads, "n_layer": 2, "n_head": heads, "d_inner": 64}
    model = XLNetLMHeadModel(XLNetConfig(**sizes, dropout=0.0))
    for param in model.parameters():
        nn.init.normal_(param, std=0.2)
    return model.to(dtype)


def batch(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Two streams in single precision, in which transformers makes the positions; else what came before, and
    segments.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 99, (ROWS, TOKENS), generator=generator)
    common = {"input_ids": ids, "attention_mask": (torch.arange(TOKENS) < torch.tensor([[8], [5], [7]])).long()}
    if dtype == torch.float64:
        before = [torch.randn(4, ROWS, width, generator=generator, dtype=dtype) for _ in range(2)]
        return {**common, "labels": ids, "mems": before, "token_type_ids": ids % 2}
    hidden, asked = torch.zeros(ROWS, TOKENS, TOKENS), torch.zeros(ROWS, 2, TOKENS)
    hidden[:, :, -1] = hidden[:, 2, 5] = asked[:, 0, -1] = asked[:, 1, 2] = 1.0
    return {**common, "labels": ids[:, :2].contiguous(), "perm_mask": hidden, "target_mapping": asked}


def trained(rank: int, world: int, heads: int) -> None:
    for dtype in (torch.float64, torch.float32):
        with keep_float64():
            plain, model = made(heads, dtype), made(heads, dtype)
            model = ShardFormer(ShardConfig()).shard_model(model)
            losses = []
            for one in (plain, model):
                loss = one(**batch(12 * heads, dtype)).loss
                loss.backward()
                losses.append(loss.detach())
        compare_models(plain, model, coordinate=rank, losses=(losses[0], losses[1]))
        spec = get_spec(model.transformer.layer[0].rel_attn.q)
        assert spec is not None
        assert spec.is_sharded


@pytest.mark.parametrize("heads", [3, pytest.param(1, marks=pytest.mark.sweep)])
def test_two_streams_by_heads(heads: int) -> None:
    run_ranks(trained, 2, heads)
