"""BERT and models with its layers."""

from __future__ import annotations

from ..heads import HeadGeometry
from ..rules import Rules, attention_rules
from .base import Policy
from .heads import policies_of_heads


class BertPolicy(Policy):
    layers = "encoder.layer.*"
    attentions: tuple[str, ...] = ("attention",)

    def rules(self) -> Rules:
        config = self.config
        geometry = HeadGeometry(config.num_attention_heads, config.num_attention_heads)
        names = (
            (*self.attentions, "crossattention") if getattr(config, "add_cross_attention", False) else self.attentions
        )
        rules: Rules = {
            f"{self.layers}.intermediate.dense": "colwise",
            f"{self.layers}.output.dense": "rowwise",
            f"{self.layers}.output.LayerNorm": "replicated",
        }
        for name in names:
            path = f"{self.layers}.{name}"
            parts = attention_rules(
                f"{path}.self", "query", "key", "value", "o", geometry=geometry, sizes=("all_head_size",)
            )
            parts[f"{path}.output.dense"] = parts.pop(f"{path}.self.o")
            rules |= {**parts, f"{path}.output.LayerNorm": "replicated"}
        return rules


__getattr__ = policies_of_heads(__name__, Bert=BertPolicy)
