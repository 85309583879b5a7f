"""BLOOM: q, k and v interleaved per head, alibi as an argument."""

from __future__ import annotations

from ..attention import by_head
from ..heads import HeadGeometry
from ..rules import Rules, attention_rules, mlp_rules
from .base import Policy
from .heads import policies_of_heads


class BloomPolicy(Policy):
    def config_sanity_check(self) -> None:
        if self.config.pretraining_tp > 1 and self.config.slow_but_exact:
            raise ValueError(
                f"pretraining_tp={self.config.pretraining_tp} with slow_but_exact=True slices whole weights; use "
                "slow_but_exact=False"
            )

    def rules(self) -> Rules:
        geometry = HeadGeometry(self.config.n_head, self.config.n_head)
        path = "h.*.self_attention"
        return {
            **attention_rules(
                path,
                o="dense",
                fused="query_key_value",
                layout="interleaved",
                geometry=geometry,
                arguments={"alibi": by_head},
            ),
            **mlp_rules("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
        }


__getattr__ = policies_of_heads(__name__, Bloom=BloomPolicy)
