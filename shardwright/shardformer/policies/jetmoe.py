"""JetMoE: experts in attention too, each with the queries and the outputs of all heads."""

from __future__ import annotations

from ..attention import LocalHeads
from ..heads import HeadGeometry
from ..rules import Rules
from ..splits import Packed
from ..styles import PartialSum, ShardedParameter
from .base import Policy


class JetMoePolicy(Policy):
    """Both blocks add up parts, of heads and of features; routers see all of a token on every rank."""

    def rules(self) -> Rules:
        heads = self.config.num_key_value_heads
        attention = "layers.*.self_attention"
        return {
            **_experts(f"{attention}.experts", ShardedParameter(1)),
            f"{attention}.kv_proj.weight": ShardedParameter(0, Packed(2)),
            f"{attention}.experts": LocalHeads(HeadGeometry(heads, heads), sizes=("hidden_size",)),
            attention: PartialSum(once=("experts.bias",)),
            **_experts("layers.*.mlp", ShardedParameter(1, Packed(2))),
            "layers.*.mlp": PartialSum(once=("bias",)),
            "layers.*.input_layernorm": "replicated",
            "layers.*.post_attention_layernorm": "replicated",
        }

    def config_sanity_check(self) -> None:
        heads, ranks = self.config.num_key_value_heads, self.shard_config.parallel.size
        if self.shard_config.enable_tensor_parallelism and heads % ranks:
            raise ValueError(
                f"num_key_value_heads={heads} of JetMoE is not a multiple of tp_size={ranks}: an expert of its "
                "attention has this many heads; use a divisor of it"
            )


def _experts(path: str, inner: ShardedParameter) -> Rules:
    """Weights [E, features, hidden] and [E, hidden, features]."""
    return {
        f"{path}.input_linear.weight": inner,
        f"{path}.output_linear.weight": ShardedParameter(2),
        f"{path}.router": "partial_gradient",
    }
