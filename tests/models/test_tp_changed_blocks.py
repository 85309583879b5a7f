"""Blocks whose forward a policy or a script replaces: reduced part by part, or refused."""

from __future__ import annotations

import types
from contextlib import nullcontext
from functools import partial
from typing import Any

import peft
import pytest
import torch
from test_tp_sums import batch, build
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2_moe import modeling_qwen2_moe as native

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
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


def looked_into(rank: int, world: int) -> None:
    """A hook that keeps what the router is given, for a loss; a checkpoint of the router's neighbour alone."""
    models: list[Any] = [build("qwen2_moe", num_hidden_layers=1) for _ in range(2)]
    models[1] = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8)).shard_model(models[1])
    losses = []
    with keep_float64():
        for model in models:
            block, kept = model.model.layers[0].mlp, []
            block.gate.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0]))
            loss = model(**batch(0)).loss + kept[0].square().mean()
            loss.backward()
            losses.append(loss.detach())
    compare_models(*models, coordinate=rank, losses=(losses[0], losses[1]))
    gate = models[1].model.layers[0].mlp.shared_expert_gate
    inner = gate.forward
    for reentrant in (False, True):
        gate.forward = partial(checkpoint, inner, use_reentrant=reentrant)
        loss = models[1](**batch(0)).loss
        with pytest.raises(ValueError, match="recomputed by itself") if reentrant else nullcontext():
            loss.backward()
    handle = models[1].model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    with pytest.raises(ValueError, match="a forward pre-hook changes what"):
        models[1](**batch(0))
    handle.remove()


def test_scripts_that_look_into_a_block_that_sums() -> None:
    run_ranks(looked_into, 2, timeout=60)


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


def adapted_late(rank: int, world: int) -> None:
    lora = peft.LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM")
    tiny: Any = partial(build, "qwen2_moe", num_hidden_layers=1)
    for how in (lambda model: peft.get_peft_model(model, lora), lambda model: model.add_adapter(lora)):
        with pytest.raises(ValueError, match=r"of a sharded model: adapters .* on the whole model"):
            how(ShardFormer(ShardConfig()).shard_model(tiny()))
    model: Any = ShardFormer(ShardConfig()).shard_model(tiny())
    peft.inject_adapter_in_model(lora, model.model)
    optimizer = torch.optim.SGD([param for name, param in model.named_parameters() if "lora" in name], lr=1.0)
    with pytest.raises(ValueError, match=r"q_proj\.lora_A.*after it was sharded.*Add adapters first"):
        optimizer.step()
    for layout in ({"tp_size": 2}, {"tp_size": 1, "zero_stage": 1}):
        boosted: Any = Booster(plugin=HybridParallelPlugin(precision="fp32", **layout)).boost(tiny())[0]
        for target in (boosted, boosted.unwrap()):
            with pytest.raises(ValueError, match=r"after boost: .* Wrap a model before boosting"):
                peft.get_peft_model(target, lora)
    for name, reached in (("deepseek_v3", {}), ("qwen2_moe", {"target_parameters": ["mlp.experts.gate_up_proj"]})):
        lora = peft.LoraConfig(r=3, target_modules=["o_proj", "down_proj"], task_type="CAUSAL_LM", **reached)
        with pytest.raises(ValueError, match=r"mlp\.experts\.\w+ \(\w+Experts?\w*\) carries .* adapt linears"):
            ShardFormer(ShardConfig()).shard_model(peft.get_peft_model(build(name), lora))


def test_adapters_come_before_sharding() -> None:
    run_ranks(adapted_late, 2, timeout=60)
