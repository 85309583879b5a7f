"""OPT: the MLP's linears sit in the layer itself."""

from __future__ import annotations

from ..rules import Rules, attention_rules, mlp_rules
from .base import Policy
from .heads import policies_of_heads


class OPTPolicy(Policy):
    def rules(self) -> Rules:
        stack = "decoder." if hasattr(self.model.get_submodule(self.base_prefix().rstrip(".")), "decoder") else ""
        layer = f"{stack}layers.*"
        return {
            **attention_rules(f"{layer}.self_attn", o="out_proj", sizes=("embed_dim",)),
            **mlp_rules(layer, "fc1", "fc2"),
            f"{layer}.self_attn_layer_norm": "replicated",
            f"{layer}.final_layer_norm": "replicated",
        }


__getattr__ = policies_of_heads(__name__, OPT=OPTPolicy)
