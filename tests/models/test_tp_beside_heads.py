"""Attention that is more than four projections, and what is sharded beside attention and MLPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from shardwright.shardformer import ModelSharder, Plan, ShardConfig
from shardwright.shardformer.layer.norm import rms_offset
from shardwright.shardformer.wide_norm import WideNorm
from shardwright.testing import run_ranks
from shardwright.testing.matrix.axes import AXES
from shardwright.testing.matrix.run import run_cells
from shardwright.testing.matrix.subject import Subject
from tests.models import tiny_causal_lm

SHORT = {"num_hidden_layers": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("BitNetForCausalLM", {**SHORT, "intermediate_size": 87}),  # norms over all heads and over 44 and 43 features
    ("JetMoeForCausalLM", {**SHORT, "output_router_logits": True}),  # experts in attention, and their loss
    ("CodeGenForCausalLM", {"n_layer": 1}),  # fused in an order of its own: computed from gathered features
    ("CpmAntForCausalLM", SHORT),  # an MLP in two modules
]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=[name for name, _ in CASES])
def test_attention_of_other_forms_is_sharded_and_trains_like_one_process(name: str, settings: dict[str, Any]) -> None:
    [result] = run_cells(Subject(name, settings=settings), [AXES["tp2"]])
    assert result["outcome"] == "verified", result
    assert result["share"] > 0.9, result


def refused(rank: int, world_size: int) -> None:
    config = ShardConfig(make_vocab_size_divisible_by=8)
    model = tiny_causal_lm.build("jetmoe", {**SHORT, "num_key_value_heads": 1, "num_attention_heads": 2})
    with pytest.raises(ValueError, match="num_key_value_heads=1 of JetMoE is not a multiple of tp_size=2"):
        ModelSharder(model, None, config).shard()
    model = tiny_causal_lm.build("bitnet", SHORT)
    sharder = ModelSharder(model, None, config)
    sharder.shard()
    norm = model.get_submodule("model.layers.0.self_attn.attn_sub_norm")
    assert rms_offset(norm) is None  # no kernel for whole norms may take it
    plan = Plan({"0": "colwise", "1": WideNorm(), "2": "rowwise"})
    with pytest.raises(ValueError, match="WideNorm applies to an RMS norm with one weight"):
        plan.decide(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)), config.parallel)
    dist.barrier()


def test_what_cannot_be_dealt_is_refused() -> None:
    run_ranks(refused, 2, timeout=60)
