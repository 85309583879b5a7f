"""GPT-NeoX and GPT-J."""

from __future__ import annotations

from shardwright.shardformer.attention import Rules, attention, mlp
from shardwright.shardformer.heads import HeadGeometry
from shardwright.shardformer.policies.base import Policy


class GPTNeoXPolicy(Policy):
    def rules(self) -> Rules:
        geometry = HeadGeometry(self.config.num_attention_heads, self.config.num_attention_heads)
        return {
            **attention("layers.*.attention", o="dense", fused="query_key_value", layout="interleaved", geometry=geometry),
            **mlp("layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
        }


class GPTJPolicy(Policy):
    def rules(self) -> Rules:
        return {**attention("h.*.attn", o="out_proj", sizes=("embed_dim",)), **mlp("h.*.mlp", "fc_in", "fc_out")}
