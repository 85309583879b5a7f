"""All-reduces per layer, as docs/tensor_parallel.md has them."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf

from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.testing import run_ranks
from tests.ranks.counting import CountCollectives

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
EXPERTS: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def llama(layers: int) -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL, num_key_value_heads=2, num_hidden_layers=layers))


def gptj(layers: int) -> Any:
    return tf.GPTJForCausalLM(
        tf.GPTJConfig(vocab_size=64, n_embd=32, n_layer=layers, n_head=4, rotary_dim=4, n_positions=16)
    )


def phi(layers: int) -> Any:
    return tf.PhiForCausalLM(tf.PhiConfig(**SMALL, num_hidden_layers=layers))


def gpt_neox(layers: int, beside: bool) -> Any:
    return tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SMALL, num_hidden_layers=layers, use_parallel_residual=beside))


def falcon(layers: int, **settings: Any) -> Any:
    return tf.FalconForCausalLM(
        tf.FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=4, num_hidden_layers=layers, **settings)
    )


def mixtral(layers: int) -> Any:
    return tf.MixtralForCausalLM(
        tf.MixtralConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, num_hidden_layers=layers)
    )


def qwen2_moe(layers: int) -> Any:
    config = tf.Qwen2MoeConfig(
        **EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=1,
        num_hidden_layers=layers,
        mlp_only_layers=[],
    )
    return tf.Qwen2MoeForCausalLM(config)


def deepseek(layers: int, dense: bool) -> Any:
    return tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(**LATENT, num_hidden_layers=layers, first_k_dense_replace=layers if dense else 0)
    )


def cohere(layers: int, v2: bool = False) -> Any:
    sizes = {**SMALL, "num_key_value_heads": 2, "num_hidden_layers": layers}
    return tf.Cohere2ForCausalLM(tf.Cohere2Config(**sizes)) if v2 else tf.CohereForCausalLM(tf.CohereConfig(**sizes))


def glm4_moe(layers: int) -> Any:
    sizes = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
    return tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**EXPERTS, **sizes, num_hidden_layers=layers, head_dim=8))


def qwen3_next(layers: int) -> Any:
    sizes = {"num_experts": 4, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": []}
    types = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers, "head_dim": 8}
    return tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**EXPERTS, **sizes, **types))


CASES: dict[str, tuple[Any, tuple[int, int]]] = {
    "dense": (llama, (2, 2)),
    "side by side": (gptj, (1, 1)),
    "side by side, dropouts in between": (phi, (1, 1)),
    "side by side, two norms": (lambda layers: gpt_neox(layers, True), (1, 2)),
    "one after the other": (lambda layers: gpt_neox(layers, False), (2, 2)),
    # whose linears are a class of their own, and take their input each for itself
    "side by side, falcon": (lambda layers: falcon(layers, multi_query=False), (1, 2)),
    "side by side, two norms, grouped": (lambda layers: falcon(layers, new_decoder_architecture=True), (1, 2)),
    "falcon, one after the other": (lambda layers: falcon(layers, multi_query=False, parallel_attn=False), (2, 2)),
    "experts": (mixtral, (2, 2)),
    "shared expert": (qwen2_moe, (2, 2)),
    "latent attention": (lambda layers: deepseek(layers, True), (2, 4)),
    "latent attention, shared expert": (lambda layers: deepseek(layers, False), (2, 4)),
    # families without policies of their own
    "side by side, cohere": (cohere, (1, 1)),
    "side by side, cohere2": (lambda layers: cohere(layers, True), (1, 1)),
    "shared expert, glm4": (glm4_moe, (2, 2)),
    "shared expert, norms of heads, qwen3-next": (qwen3_next, (2, 4)),
}


def counts(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    ids = torch.arange(16).view(2, 8)
    found = {}
    for name, (build, _) in CASES.items():
        seen = []
        for layers in (1, 2):
            torch.manual_seed(0)
            model = ShardFormer(ShardConfig(make_vocab_size_divisible_by=8)).shard_model(build(layers))
            with CountCollectives() as forward:
                loss = model(input_ids=ids, labels=ids).loss
            with CountCollectives() as backward:
                loss.backward()
            seen.append((forward.calls["allreduce_"], backward.calls["allreduce_"]))
        found[name] = (seen[1][0] - seen[0][0], seen[1][1] - seen[0][1])
    return found


def test_all_reduces_per_layer():
    for found in run_ranks(counts, 2):
        assert found == {name: expected for name, (_, expected) in CASES.items()}
