"""Blocks whose forward a policy or a script replaces: reduced part by part, or refused."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from test_tp_sums import batch, build
from transformers.models.qwen2_moe import modeling_qwen2_moe as native

from shardwright.shardformer import ModulePolicyDescription, ShardConfig, ShardFormer
from shardwright.shardformer.policies.moe import Qwen2MoePolicy
from shardwright.testing import compare_models, keep_float64, run_ranks

_forward = native.Qwen2MoeSparseMoeBlock.forward


def bent(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return _forward(self, hidden_states).tanh() + hidden_states


class BentPolicy(Qwen2MoePolicy):
    def module_policy(self) -> Any:
        return {native.Qwen2MoeSparseMoeBlock: ModulePolicyDescription(method_replacement={"forward": bent})}


def replaced_by_policy(rank: int, world: int) -> None:
    config = ShardConfig(make_vocab_size_divisible_by=8)
    reference: Any = build("qwen2_moe")
    for layer in reference.model.layers:
        layer.mlp.forward = types.MethodType(bent, layer.mlp)
    model: Any = ShardFormer(config).shard_model(build("qwen2_moe"), BentPolicy())
    with keep_float64():
        losses = [each(**batch(0)).loss for each in (reference, model)]
        for loss in losses:
            loss.backward()
    compare_models(reference, model, coordinate=rank, losses=(losses[0].detach(), losses[1].detach()))


def replaced_by_script(rank: int, world: int) -> None:
    model: Any = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8)).shard_model(build("qwen2_moe"))
    expected = model(**batch(0)).loss
    block = model.model.layers[0].mlp
    inner = block.forward
    block.forward = lambda hidden_states: inner(hidden_states)
    torch.testing.assert_close(model(**batch(0)).loss, expected)
    block.forward = types.MethodType(bent, block)
    with pytest.raises(ValueError, match="was replaced after sharding"):
        model(**batch(0))


def test_a_block_that_a_policy_makes_no_sum_is_reduced_part_by_part() -> None:
    run_ranks(replaced_by_policy, 2, timeout=60)


def test_a_forward_in_front_of_a_block_that_sums_must_call_it() -> None:
    run_ranks(replaced_by_script, 2, timeout=60)
