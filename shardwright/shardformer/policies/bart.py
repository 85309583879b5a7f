"""BART and models with its layers: the MLP's linears sit in the layer itself, as in OPT."""

from __future__ import annotations

from ..heads import HeadGeometry
from ..rules import Rules, attention_rules, mlp_rules
from .base import Policy
from .heads import policies_of_heads


class BartPolicy(Policy):
    def rules(self) -> Rules:
        base = self.model.get_submodule(self.base_prefix().rstrip("."))
        rules: Rules = {}
        for stack, names in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
            if not hasattr(base, stack):  # a decoder alone
                continue
            heads = getattr(self.config, f"{stack}_attention_heads")
            layer = f"{stack}.layers.*"
            for name in names:
                rules |= attention_rules(f"{layer}.{name}", o="out_proj", geometry=HeadGeometry(heads, heads))
                rules[f"{layer}.{name}_layer_norm"] = "replicated"
            rules |= {**mlp_rules(layer, "fc1", "fc2"), f"{layer}.final_layer_norm": "replicated"}
        return rules


__getattr__ = policies_of_heads(__name__, Bart=BartPolicy)
