"""ChatGLM2 and 3: q, k and v in one linear, gate and up in one, keys and values shared in groups."""

from __future__ import annotations

from torch import Tensor

from ..attention import LocalHeadIndex
from ..heads import HeadGeometry
from ..rules import Rules, attention_rules
from .base import Policy
from .heads import policies_of_heads


class ChatGLMPolicy(Policy):
    def _prefix_modules(self) -> list[str]:
        linears = ["prefix_encoder.trans.0", "prefix_encoder.trans.2"]
        return ["prefix_encoder.embedding", *(linears if self.config.prefix_projection else [])]

    def rules(self) -> Rules:
        config = self.config
        geometry = HeadGeometry(config.num_attention_heads, config.num_key_value_heads)

        def of_groups(prefix: Tensor, index: LocalHeadIndex) -> Tensor:
            """This rank's groups of [2, B, groups, P, channels]."""
            groups = sorted({head // geometry.heads_per_key for head in index.heads})
            return prefix.narrow(2, groups[0], len(groups))

        prefixed = config.pre_seq_len is not None
        return {
            **attention_rules(
                "encoder.layers.*.self_attention",
                o="dense",
                fused="query_key_value",
                layout="packed" if config.multi_query_attention else "interleaved",
                geometry=geometry,
                arguments={"prefix": of_groups} if prefixed else {},
            ),
            "encoder.layers.*.mlp.dense_h_to_4h": "packed_colwise",
            "encoder.layers.*.mlp.dense_4h_to_h": "rowwise",
            # every rank reads its own groups of the prefix
            **dict.fromkeys(self._prefix_modules() if prefixed else (), "partial_gradient"),
        }


__getattr__ = policies_of_heads(__name__, ChatGLM=ChatGLMPolicy)
