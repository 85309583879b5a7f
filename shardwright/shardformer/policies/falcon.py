"""Falcon: q, k and v fused in three ways, alibi or rotary positions."""

from __future__ import annotations

from ..attention import by_head
from ..heads import HeadGeometry
from ..rules import Rules, attention_rules, mlp_rules
from ..side_by_side import SideBySide
from .base import Policy
from .heads import policies_of_heads


class FalconPolicy(Policy):
    """Old multi-head and new grouped layouts hold [queries of the group, k, v] for every key/value head; multi-query
    has one group.
    """

    def rules(self) -> Rules:
        config = self.config
        grouped = config.new_decoder_architecture or not config.multi_query
        geometry = HeadGeometry(config.num_attention_heads, config.num_kv_heads if grouped else 1)
        beside = config.new_decoder_architecture or config.parallel_attn
        arguments = {"alibi": by_head, "attention_mask": by_head} if config.alibi else {}
        return {
            **attention_rules(
                "h.*.self_attention",
                o="dense",
                fused="query_key_value",
                layout="interleaved",
                geometry=geometry,
                arguments=arguments,
            ),
            **mlp_rules("h.*.mlp", "dense_h_to_4h", "dense_4h_to_h"),
            **({"h.*": SideBySide("self_attention.dense", "mlp.dense_4h_to_h")} if beside else {}),
        }


__getattr__ = policies_of_heads(__name__, Falcon=FalconPolicy)
