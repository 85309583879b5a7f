"""Llama 1 to 3, Mistral, Qwen 2 and 3."""

from __future__ import annotations

from shardwright.shardformer.attention import Rules, attention, mlp
from shardwright.shardformer.policies.base import Policy


class LlamaPolicy(Policy):
    def rules(self) -> Rules:
        return {**attention("layers.*.self_attn"), **mlp("layers.*.mlp", ("gate_proj", "up_proj"), "down_proj")}


class Qwen3Policy(LlamaPolicy):
    """Llama with a norm over every head of q and k."""

    def rules(self) -> Rules:
        return {**super().rules(), "layers.*.self_attn.q_norm": "partial_gradient", "layers.*.self_attn.k_norm": "partial_gradient"}
