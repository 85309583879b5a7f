"""T5: encoder and decoder stacks, relative position bias in their first blocks."""

from __future__ import annotations

from ..heads import HeadGeometry
from ..rules import Rules, attention_rules, mlp_rules
from ..splits import Heads
from ..styles import HiddenEmbedding
from .base import Policy
from .heads import policies_of_heads


class T5Policy(Policy):
    """The bias is one column per head, so it is sharded with the heads; blocks hand their heads' bias on to the
    next.
    """

    def rules(self) -> Rules:
        config = self.config
        geometry = HeadGeometry(config.num_heads, config.num_heads)
        rules: Rules = {}
        base = self.model.get_submodule(self.base_prefix().rstrip("."))
        ups = ("wi_0", "wi_1") if config.is_gated_act else ("wi",)
        for stack, cross in (("encoder", False), ("decoder", True)):
            if not hasattr(base, stack):
                continue
            layers = f"{stack}.block.*.layer"
            names = ("0.SelfAttention", "1.EncDecAttention") if cross else ("0.SelfAttention",)
            for name in names:
                rules |= attention_rules(
                    f"{layers}.{name}", "q", "k", "v", "o", geometry=geometry, sizes=("inner_dim",)
                )
            rules[f"{layers}.0.SelfAttention.relative_attention_bias"] = HiddenEmbedding(Heads("q", geometry))
            rules |= mlp_rules(f"{layers}.{len(names)}.DenseReluDense", ups, "wo")
        return rules


__getattr__ = policies_of_heads(__name__, T5=T5Policy)
