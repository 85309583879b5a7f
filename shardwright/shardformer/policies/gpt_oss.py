"""GPT-OSS: attention sinks, experts with biases whose gate and up features are interleaved."""

from __future__ import annotations

from shardwright.shardformer.policies.base import Policy
from shardwright.shardformer.rules import Rules, attention_rules
from shardwright.shardformer.splits import Even, Heads
from shardwright.shardformer.styles import PartialSum, ShardedParameter


class GptOssPolicy(Policy):
    """gate_up_proj [E, H, 2I] holds gate and up of one feature side by side; down_proj [E, I, H]; one sink per head."""

    def rules(self) -> Rules:
        pairs, experts = Even(granule=2), "layers.*.mlp.experts"
        return {
            **attention_rules("layers.*.self_attn"),
            "layers.*.self_attn.sinks": ShardedParameter(0, Heads("q")),
            f"{experts}.gate_up_proj": ShardedParameter(2, pairs),
            f"{experts}.gate_up_proj_bias": ShardedParameter(1, pairs),
            f"{experts}.down_proj": ShardedParameter(1),
            experts: PartialSum(once=("down_proj_bias",)),
            "layers.*.mlp.router": "replicated",
        }
