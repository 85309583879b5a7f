"""JetMoE: experts in attention too, each with the queries and the outputs of all heads.

Attention and MLP return the ranks' parts of a sum, of heads and of features. What a router says of a token is alike on
all ranks, and so is its gradient: that of the gates, which weigh parts, is summed over the ranks, that of the tokens is
given in shares, as the block around sums it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...ops.collective import copy_to_group
from ...spec import ParamSpec
from ..attention import LocalHeads
from ..heads import HeadGeometry
from ..layer.parallel_module import ParallelModule
from ..rules import Rules
from ..splits import Packed
from ..styles import PartialSum, ShardedParameter, Site, Style
from .base import Policy


class JetMoePolicy(Policy):
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
        f"{path}.router": _Routing(),
    }


class _Routing(Style):
    """A router, whole on every rank, inside of a module that sums its gradients."""

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        _Router.adopt(site.module, site.parallel)


class _Router(ParallelModule):
    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        """x [tokens, hidden] -> where tokens go, where they come from, gates, tokens per expert, logits."""
        x = x.detach() + (x - x.detach()) / self.parallel.size
        places, tokens, gates, sizes, logits = super().forward(x)
        return places, tokens, copy_to_group(gates, self.parallel.group), sizes, logits
