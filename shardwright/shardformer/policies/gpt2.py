"""GPT-2: q, k and v fused in a Conv1D, [in, out]."""

from __future__ import annotations

from ..rules import Rules, attention_rules, mlp_rules
from .base import Policy
from .heads import policies_of_heads


class GPT2Policy(Policy):
    def config_sanity_check(self) -> None:
        if getattr(self.config, "add_cross_attention", False):
            raise ValueError(
                "GPT-2 with add_cross_attention=True has no plan for its cross attention; pass a policy that adds "
                "rules for it"
            )

    def rules(self) -> Rules:
        return {
            **attention_rules("h.*.attn", fused="c_attn", o="c_proj", sizes=("split_size", "embed_dim")),
            **mlp_rules("h.*.mlp", "c_fc", "c_proj"),
        }


__getattr__ = policies_of_heads(__name__, GPT2=GPT2Policy)
