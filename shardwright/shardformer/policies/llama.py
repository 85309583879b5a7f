"""Llama 1 to 3, Mistral, Qwen 2 and 3."""

from __future__ import annotations

from ..rules import Rules, attention_rules, mlp_rules
from .base import Policy
from .heads import policies_of_heads


class LlamaPolicy(Policy):
    def rules(self) -> Rules:
        return {
            **attention_rules("layers.*.self_attn"),
            **mlp_rules("layers.*.mlp", ("gate_proj", "up_proj"), "down_proj"),
        }


class Qwen3Policy(LlamaPolicy):
    """Llama with a norm over every head of q and k."""

    def rules(self) -> Rules:
        return {
            **super().rules(),
            "layers.*.self_attn.q_norm": "partial_gradient",
            "layers.*.self_attn.k_norm": "partial_gradient",
        }


__getattr__ = policies_of_heads(__name__, Llama=LlamaPolicy, Mistral=LlamaPolicy, Qwen2=LlamaPolicy, Qwen3=Qwen3Policy)
