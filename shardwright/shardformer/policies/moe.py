"""Mixtral, Qwen 2 and 3 with experts, DeepSeek V2 and V3."""

from __future__ import annotations

import torch.nn as nn

from ..rules import Rules, attention_rules, expert_rules, latent_attention_rules, mlp_rules
from ..sum_at_exit import SumAtExit, why_not
from .base import Policy
from .heads import policies_of_heads

_GATED = ("gate_proj", "up_proj")


class MixtralPolicy(Policy):
    def rules(self) -> Rules:
        return {
            **attention_rules("layers.*.self_attn"),
            **expert_rules("layers.*.mlp.experts"),
            "layers.*.mlp.gate": "replicated",
        }


class SparsePolicy(Policy):
    """Layers with experts and layers with one dense MLP mixed, as the config says."""

    shared: str | None = None  # name of an MLP that every token passes, beside the experts

    def attention_rules(self) -> Rules:
        return attention_rules("layers.*.self_attn")

    def rules(self) -> Rules:
        rules = self.attention_rules()
        layers = self.model.get_submodule(f"{self.base_prefix()}layers")
        assert isinstance(layers, nn.ModuleList)
        for index, layer in enumerate(layers):
            path = f"layers.{index}.mlp"
            assert isinstance(layer.mlp, nn.Module)
            if not hasattr(layer.mlp, "experts"):
                rules |= mlp_rules(path, _GATED, "down_proj")
                continue
            rules |= {**expert_rules(f"{path}.experts"), f"{path}.gate": "replicated"}
            if self.shared is not None and hasattr(layer.mlp, self.shared):
                rules |= mlp_rules(f"{path}.{self.shared}", _GATED, "down_proj")
                parts = ("experts", f"{self.shared}.down_proj")
                if why_not(layer.mlp, parts) is None:  # else both are reduced for themselves
                    rules[path] = SumAtExit(parts)
            if hasattr(layer.mlp, "shared_expert_gate"):
                rules[f"{path}.shared_expert_gate"] = "replicated"
        return rules


class Qwen2MoePolicy(SparsePolicy):
    shared = "shared_expert"


class Qwen3MoePolicy(SparsePolicy):
    def attention_rules(self) -> Rules:
        norms: Rules = {
            "layers.*.self_attn.q_norm": "partial_gradient",
            "layers.*.self_attn.k_norm": "partial_gradient",
        }
        return {**super().attention_rules(), **norms}


class DeepseekPolicy(SparsePolicy):
    """Latent attention; the first layers are dense."""

    shared = "shared_experts"

    def attention_rules(self) -> Rules:
        config = self.config
        return latent_attention_rules(
            "layers.*.self_attn", config.num_attention_heads, config.qk_rope_head_dim, config.q_lora_rank
        )


__getattr__ = policies_of_heads(__name__, Mixtral=MixtralPolicy, Deepseek=DeepseekPolicy)
