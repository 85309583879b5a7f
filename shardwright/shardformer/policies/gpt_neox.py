"""GPT-NeoX and GPT-J."""

from __future__ import annotations

from ..heads import HeadGeometry
from ..rules import Rules, attention_rules, mlp_rules
from ..side_by_side import SideBySide
from .base import Policy
from .heads import policies_of_heads


class GPTNeoXPolicy(Policy):
    def rules(self) -> Rules:
        geometry = HeadGeometry(self.config.num_attention_heads, self.config.num_attention_heads)
        beside: Rules = {"layers.*": SideBySide("attention.dense", "mlp.dense_4h_to_h")}
        return {
            **attention_rules(
                "layers.*.attention", o="dense", fused="query_key_value", layout="interleaved", geometry=geometry
            ),
            **mlp_rules("layers.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
            **(beside if self.config.use_parallel_residual else {}),
        }


class GPTJPolicy(Policy):
    def rules(self) -> Rules:
        return {
            **attention_rules("h.*.attn", o="out_proj", sizes=("embed_dim",)),
            **mlp_rules("h.*.mlp", "fc_in", "fc_out"),
            "h.*": SideBySide("attn.out_proj", "mlp.fc_out"),
        }


__getattr__ = policies_of_heads(__name__, GPTJ=GPTJPolicy, GPTNeoX=GPTNeoXPolicy)
