"""OPT: the MLP's linears sit in the layer itself."""

from __future__ import annotations

from shardwright.shardformer.attention import Rules, attention, mlp
from shardwright.shardformer.policies.base import Policy


class OPTPolicy(Policy):
    def rules(self) -> Rules:
        stack = "decoder." if hasattr(self.model.get_submodule(self.base_prefix().rstrip(".")), "decoder") else ""
        layer = f"{stack}layers.*"
        return {
            **attention(f"{layer}.self_attn", o="out_proj", sizes=("embed_dim",)),
            **mlp(layer, "fc1", "fc2"),
            f"{layer}.self_attn_layer_norm": "replicated",
            f"{layer}.final_layer_norm": "replicated",
        }
