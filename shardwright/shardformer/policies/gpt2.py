"""GPT-2: q, k and v fused in a Conv1D, [in, out]."""

from __future__ import annotations

from shardwright.shardformer.attention import Rules, attention, mlp
from shardwright.shardformer.policies.base import Policy


class GPT2Policy(Policy):
    def config_sanity_check(self) -> None:
        if getattr(self.config, "add_cross_attention", False):
            raise ValueError(
                "GPT-2 with add_cross_attention=True has no plan for its cross attention; pass a policy that adds rules for it"
            )

    def rules(self) -> Rules:
        return {
            **attention("h.*.attn", fused="c_attn", o="c_proj", sizes=("split_size", "embed_dim")),
            **mlp("h.*.mlp", "c_fc", "c_proj"),
        }
