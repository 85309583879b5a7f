"""Blocks that are reduced once where they end: experts with shared experts."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers as tf
from torch import nn

from shardwright import Booster
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.shardformer.linearity import why_no_sum
from shardwright.shardformer.policies.moe import Qwen2MoePolicy
from shardwright.shardformer.rules import Rules
from shardwright.shardformer.sum_at_exit import SumAtExit
from shardwright.testing import adamw, compare_models, keep_float64, run_ranks, train_steps

SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 18,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "experts_implementation": "eager",
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
AUXILIARY = {"output_router_logits": True, "router_aux_loss_coef": 0.7}  # large enough to be seen
TARGETS = r".*(shared_experts?\.(gate_proj|up_proj|down_proj)|o_proj|shared_expert_gate)"


def build(name: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    if name == "qwen2_moe":
        own = {"num_experts": 4, "shared_expert_intermediate_size": 18, "decoder_sparse_step": 1, "mlp_only_layers": []}
        model = tf.Qwen2MoeForCausalLM(tf.Qwen2MoeConfig(**{**SMALL, **own, **settings}))
    elif name == "glm4_moe":  # which has no policy of its own
        grouped = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "head_dim": 8}
        model = tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**{**SMALL, **grouped, "first_k_dense_replace": 1, **settings}))
    elif name == "deepseek_v3":
        model = tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**{**LATENT, **settings}))
    else:
        model = tf.DeepseekV2ForCausalLM(tf.DeepseekV2Config(**{**LATENT, "topk_method": "greedy", **settings}))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)
    return model.double().train()


def batch(step: int, samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    length = 9 + 2 * (step % 2)
    ids = torch.randint(1, 101, (samples, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(samples):
        mask[row, length - row :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def sums_of(model: nn.Module) -> int:
    return sum(hasattr(module, "_whole_parameters") for module in model.modules())


def plain_loop(rank: int, world: int, name: str, settings: dict[str, Any]) -> int:
    reference, model = build(name, **settings), build(name, **settings)
    with keep_float64():
        model = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8)).shard_model(model)
        batches = [batch(step) for step in range(2)]
        losses = (
            train_steps(reference, adamw(reference), batches),
            train_steps(model, adamw(model), batches),
        )
    compare_models(reference, model, coordinate=rank, losses=losses)
    return sums_of(model)


@pytest.mark.parametrize(
    ("name", "settings"), [("qwen2_moe", {}), ("qwen2_moe", AUXILIARY), ("deepseek_v3", {}), ("deepseek_v2", {})]
)
def test_a_plain_loop_trains_like_one_process(name: str, settings: dict[str, Any]) -> None:
    assert run_ranks(plain_loop, 2, name, settings, timeout=110) == [1 if "deepseek" in name else 2] * 2


def plugin_steps(rank: int, world: int, cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> None:
    for name, layout, settings in cases:
        settings = dict(settings)
        with_adapters, recompute = settings.pop("lora", False), settings.pop("recompute", False)
        frozen = settings.pop("frozen", ())
        models: list[Any] = [build(name, **settings), build(name, **settings)]
        if with_adapters:
            torch.manual_seed(3)
            models = [peft.get_peft_model(model, adapters()) for model in models]
            for first, second in zip(*(model.parameters() for model in models), strict=True):
                if first.requires_grad:
                    first.data = 0.2 * torch.randn_like(first)
                    second.data = first.data.clone()
        for model in models:
            for parameter, param in model.named_parameters():
                param.requires_grad_(param.requires_grad and not parameter.endswith(frozen))
        reference, model = models
        if recompute:
            layout = {**layout, "gradient_checkpoint_config": PipelineGradientCheckpointConfig(1.0)}
            model.gradient_checkpointing_enable()
        plugin = HybridParallelPlugin(precision="fp32", max_norm=0.0, **layout)
        booster = Booster(plugin=plugin)
        with keep_float64():
            model, optimizer, *_ = booster.boost(model, adamw(model))
            reference_optimizer = adamw(reference)
            for step in range(2):
                expected = reference(**batch(step)).loss
                reference_optimizer.zero_grad()
                optimizer.zero_grad()
                expected.backward()
                result = booster.execute_pipeline(
                    iter([batch(step)]), model, lambda outputs, inputs: outputs.loss, optimizer, return_loss=True
                )
                gradients = optimizer.gradients()
                found = result["loss"]
                compare_models(
                    reference,
                    model,
                    coordinate=plugin.mesh.coordinate,
                    losses=None if found is None else (expected.detach(), found.double()),
                    gradients=gradients,
                    weights=False,
                )
                optimizer.step()
                reference_optimizer.step()
                compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=False)


def adapters() -> Any:
    return peft.LoraConfig(r=3, lora_alpha=6, target_modules=TARGETS, task_type="CAUSAL_LM")


def test_plugins_train_like_one_process() -> None:
    two: list[Any] = [
        ("qwen2_moe", {"tp_size": 2}, AUXILIARY),
        ("qwen2_moe", {"tp_size": 2, "zero_stage": 0}, {"recompute": True}),
        ("deepseek_v3", {"tp_size": 2, "zero_stage": 0}, {"recompute": True}),
        ("glm4_moe", {"tp_size": 2, "zero_stage": 0}, {"recompute": True}),
        ("qwen2_moe", {"tp_size": 2}, {"lora": True}),
        ("deepseek_v3", {"tp_size": 2}, {"frozen": ("gate.weight", "shared_experts.down_proj.weight", "gate_up_proj")}),
    ]
    run_ranks(plugin_steps, 2, two, timeout=110)


def test_plugins_with_pipelines_train_like_one_process() -> None:
    four: list[Any] = [
        ("qwen2_moe", {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb"}, {}),
        ("deepseek_v3", {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "pp_style": "zb"}, {"recompute": True}),
        ("deepseek_v2", {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}, {}),
        ("qwen2_moe", {"tp_size": 4, "zero_stage": 0}, {}),
        ("qwen2_moe", {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb"}, {"lora": True}),
    ]
    run_ranks(plugin_steps, 4, four, timeout=110)


class Block(nn.Module):
    """y = f(a(x), b(x))"""

    def __init__(self, combine: Any) -> None:
        super().__init__()
        self.a, self.b, self.up = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)
        self.combine = combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(self, x, self.a(x), self.b(x))


LINEAR: list[Any] = [
    lambda block, x, a, b: a + b,
    lambda block, x, a, b: 0.5 * (block.up(x).sigmoid() * a).view(6, 8) + b.flatten(0, 1),
    lambda block, x, a, b: torch.cat([a, -b], -1).sum(-1) / x.shape[0],
]
NOT_LINEAR: dict[str, Any] = {
    "native_layer_norm": lambda block, x, a, b: block.norm(a + b),
    "tanh": lambda block, x, a, b: a + b.tanh(),
    "add": lambda block, x, a, b: x + a + b,
    "mul": lambda block, x, a, b: a * b,
    "is applied": lambda block, x, a, b: block.drop(a) + b,
    "addmm": lambda block, x, a, b: block.up(a + b),  # whose bias would be added on every rank
    "copy_": lambda block, x, a, b: torch.zeros_like(x).copy_(a) + b,
    "gt": lambda block, x, a, b: (a + b) * (a > 0),
    "more, or other": lambda block, x, a, b: (a + b, x),
    "does not run": lambda block, x, a, b: (a + b).view(7, -1),
}


def test_what_is_no_sum_is_found() -> None:
    for combine in LINEAR:
        assert why_no_sum(Block(combine), ("a", "b"), 8) is None
    for expected, combine in NOT_LINEAR.items():
        reason = why_no_sum(Block(combine), ("a", "b"), 8)
        assert reason is not None
        assert expected in reason


class WithoutSharedExpert(Qwen2MoePolicy):
    def rules(self) -> Rules:
        return super().rules() | {"layers.*.mlp": SumAtExit(("experts",))}


class SplitInput(Qwen2MoePolicy):
    def rules(self) -> Rules:
        return super().rules() | {"layers.*.mlp.shared_expert.down_proj": "rowwise_split"}


def refused(rank: int, world: int) -> None:
    for policy, what in (
        (WithoutSharedExpert(), "more, or other, than what they return|add is applied"),
        (SplitInput(), r"mlp\.shared_expert\.down_proj, rule .* has the style Row; name it among the parts"),
    ):
        with pytest.raises(ValueError, match=what):
            ShardFormer(ShardConfig()).shard_model(build("qwen2_moe"), policy)
    model: Any = ShardFormer(ShardConfig()).shard_model(build("qwen2_moe"))
    hook = model.model.layers[0].mlp.gate.register_forward_hook(
        lambda module, args, output: (output[0] * 2, *output[1:])
    )
    with keep_float64():
        with pytest.raises(ValueError, match="a forward hook changes what Qwen2MoeTopKRouter returns"):
            model(**batch(0))
        hook.remove()
        model(**batch(0)).loss.backward()


def test_what_would_be_wrong_is_refused() -> None:
    run_ranks(refused, 2, timeout=60)


def one_by_one(rank: int, world: int) -> int:
    from transformers.models.qwen2_moe import modeling_qwen2_moe as native

    forward = native.Qwen2MoeSparseMoeBlock.forward
    native.Qwen2MoeSparseMoeBlock.forward = lambda self, x: forward(self, x).sin()  # type: ignore[method-assign]
    return plain_loop(rank, world, "qwen2_moe", {})


def test_a_block_that_is_no_sum_reduces_part_by_part() -> None:
    assert run_ranks(one_by_one, 2, timeout=60) == [0, 0]
