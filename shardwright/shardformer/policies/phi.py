"""Phi 1 and 2, Phi-3 and 4."""

from __future__ import annotations

from ..rules import Rules, attention_rules, mlp_rules
from ..side_by_side import SideBySide
from .base import Policy


class PhiPolicy(Policy):
    def rules(self) -> Rules:
        norms: Rules = {}
        if self.config.qk_layernorm:
            norms = {
                "layers.*.self_attn.q_layernorm": "partial_gradient",
                "layers.*.self_attn.k_layernorm": "partial_gradient",
            }
        return {
            **attention_rules("layers.*.self_attn", o="dense"),
            **mlp_rules("layers.*.mlp", "fc1", "fc2"),
            **norms,
            "layers.*": SideBySide("self_attn.dense", "mlp.fc2"),
        }


class Phi3Policy(Policy):
    """q, k and v one after the other in one linear, gate and up likewise."""

    def rules(self) -> Rules:
        return {
            **attention_rules("layers.*.self_attn", fused="qkv_proj", config=True),
            "layers.*.mlp.gate_up_proj": "packed_colwise",
            "layers.*.mlp.down_proj": "rowwise",
        }
