"""DBRX: q, k and v fused, experts whose weights [E * features, hidden] are viewed expert by expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...spec import ParamSpec
from ..rules import Rules, attention_rules
from ..splits import Packed, deal
from ..styles import PartialSum, ShardedParameter, Site
from .base import Policy


class DbrxPolicy(Policy):
    def rules(self) -> Rules:
        layer, experts = "blocks.*.norm_attn_norm", "blocks.*.ffn.experts"
        rows = ShardedParameter(0, Packed(self.config.ffn_config.moe_num_experts))
        return {
            **attention_rules(f"{layer}.attn", o="out_proj", fused="Wqkv", sizes=("hidden_size",)),
            experts: _Experts(),
            **{f"{experts}.mlp.{name}": rows for name in ("w1", "v1", "w2")},
            "blocks.*.ffn.router": "replicated",
        }


class _Experts(PartialSum):
    """Experts that view their weights by the number of features of one."""

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        experts: Any = site.module
        (features,) = deal(experts.ffn_hidden_size, site.parallel.size)[site.parallel.rank]
        experts.ffn_hidden_size = features.length
