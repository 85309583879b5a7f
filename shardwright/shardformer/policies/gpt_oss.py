"""GPT-OSS: attention sinks, experts with biases whose gate and up features are interleaved."""

from __future__ import annotations

from ..rules import Rules, attention_rules
from ..splits import Even, Heads
from ..styles import PartialSum, ShardedParameter
from .base import Policy


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
