"""Attention that is more than four projections, and what is sharded beside attention and MLPs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.shardformer import ModelSharder, Plan, ShardConfig
from shardwright.shardformer.apply import apply_plan
from shardwright.shardformer.layer.norm import rms_offset
from shardwright.shardformer.wide_norm import WideNorm
from shardwright.testing import compare_models, run_ranks
from shardwright.testing.matrix.axes import AXES
from shardwright.testing.matrix.run import run_cells
from shardwright.testing.matrix.subject import Subject
from tests.models import tiny_causal_lm

SHORT = {"num_hidden_layers": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("BitNetForCausalLM", {**SHORT, "intermediate_size": 87}),  # norms over all heads and over 44 and 43 features
    ("JetMoeForCausalLM", {**SHORT, "output_router_logits": True}),  # experts in attention, and their loss
    ("CodeGenForCausalLM", {"n_layer": 1, "n_head": 8}),  # fused in four blocks of heads
    ("CpmAntForCausalLM", SHORT),  # an MLP in two modules
    ("DiffLlamaForCausalLM", {**SHORT, "num_attention_heads": 8, "num_key_value_heads": 4}),  # heads in pairs
    ("DogeForCausalLM", SHORT),  # a linear from values to numbers for each head of them
    ("TrOCRForCausalLM", {"decoder_layers": 2}),  # features of all heads by the width of the input
    ("MptForCausalLM", {"n_layers": 2}),  # a bias by position of all heads
]
BY_HEADS = {
    "diffllama": {**SHORT, "num_attention_heads": 8, "num_key_value_heads": 4},
    "doge": SHORT,
    "trocr": {"decoder_layers": 2},
    "mpt": {"n_layers": 2},
}


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
    with pytest.raises(ValueError, match="WideNorm applies to an RMS norm with one weight"):
        _sharded(nn.LayerNorm(9, bias=False))
    dist.barrier()


def _sharded(norm: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 9), norm, nn.Linear(9, 4))
    for param in model.parameters():
        nn.init.normal_(param)
    plan = Plan({"0": "colwise", "1": WideNorm(), "2": "rowwise"})
    apply_plan(model.double(), plan, ShardConfig().parallel)
    return model


def dealt(rank: int, world_size: int) -> None:
    """torch's own norm, in one kernel elsewhere, over nine features; what is computed whole is told of."""
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(4, 9), nn.RMSNorm(9, eps=0.1), nn.Linear(9, 4))
    for param in whole.parameters():
        nn.init.normal_(param)
    whole, model = whole.double(), _sharded(nn.RMSNorm(9, eps=0.1))
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    losses = [one(x).square().sum() for one in (whole, model)]
    for loss in losses:
        loss.backward()
    compare_models(whole, model, coordinate=rank, losses=(losses[0].detach(), losses[1].detach()), tolerance=1e-10)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    ModelSharder(tiny_causal_lm.build("codegen", {"n_layer": 1, "n_head": 4}), None, ShardConfig()).shard()
    logging.getLogger("shardwright").removeHandler(handler)
    assert [line for line in told if "attn are computed whole on every rank" in line], told
    for name, settings in BY_HEADS.items():
        model = tiny_causal_lm.build(name, settings)
        ModelSharder(model, None, ShardConfig()).shard()
        assert not any(getattr(module, "gather_output", False) for module in model.modules()), name
    refused(rank, world_size)


def test_what_is_dealt_computed_whole_and_refused() -> None:
    run_ranks(dealt, 2, timeout=60)
