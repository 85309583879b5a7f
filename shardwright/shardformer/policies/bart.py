"""BART and models with its layers: the MLP's linears sit in the layer itself, as in OPT."""

from __future__ import annotations

from functools import partial

from ..heads import HeadGeometry
from ..rules import Rules, attention_rules, mlp_rules
from ..styles import VocabEmbedding, VocabHead
from .base import Policy
from .heads import policies_of_heads


class BartPolicy(Policy):
    def rules(self) -> Rules:
        base = self.model.get_submodule(self.base_prefix().rstrip("."))
        rules: Rules = {}
        for stack, names in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
            if not hasattr(base, stack):  # a decoder alone
                continue
            heads = getattr(self.config, f"{stack}_attention_heads", None) or self.config.num_attention_heads
            layer = f"{stack}.layers.*"
            first = base.get_submodule(f"{stack}.layers.0")
            for name in filter(partial(hasattr, first), names):
                rules |= attention_rules(f"{layer}.{name}", o="out_proj", geometry=HeadGeometry(heads, heads))
                rules[f"{layer}.{name}_layer_norm"] = "replicated"
            rules |= {**mlp_rules(layer, "fc1", "fc2"), f"{layer}.final_layer_norm": "replicated"}
        return rules


class MusicgenPolicy(BartPolicy):
    """A vocabulary for every codebook; the loss reads the logits of all of them."""

    def vocabulary_rules(self) -> Rules:
        embeddings = f"{self.base_prefix()}decoder.embed_tokens.*"
        multiple = self.shard_config.make_vocab_size_divisible_by
        heads: Rules = (
            {"lm_heads.*": VocabHead(multiple, gather_output=True)} if hasattr(self.model, "lm_heads") else {}
        )
        return {embeddings: VocabEmbedding(multiple), **heads}


__getattr__ = policies_of_heads(__name__, Bart=BartPolicy)
