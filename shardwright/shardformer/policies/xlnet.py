"""Policy of XLNet, whose attention multiplies with parameters [d_model, heads, features] and has no linears."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...ops.collective import copy_all_to_group, reduce_from_group
from ...spec import ParamSpec
from ..heads import HeadGeometry
from ..layer.linear import join_name
from ..layer.parallel_module import ParallelModule
from ..rng import sharded_rng
from ..rules import Rules, mlp_rules
from ..splits import Heads
from ..styles import Site, Style
from .base import Policy

# Parameter -> the dim that runs over heads.
_HEADS = {
    **dict.fromkeys(("q", "k", "v", "o", "r", "seg_embed"), 1),
    **dict.fromkeys(("r_r_bias", "r_s_bias", "r_w_bias"), 0),
}


@dataclass(frozen=True)
class RelativeHeads(Style):
    """Two streams of relative attention, of which every rank computes some heads; each stream is summed before the
    residual, which is whole.
    """

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        heads = int(site.module.n_head)  # type: ignore[arg-type]
        split = Heads("q", HeadGeometry(heads, heads))
        found = {}
        for name, dim in _HEADS.items():
            shape = tuple(site.module.get_parameter(name).shape)
            found[name] = ParamSpec(join_name(site.name, name), shape, dim, site.pieces(split, shape[dim]))
        return found

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        _ByHeads.adopt(site.module, site.parallel)


class _ByHeads(ParallelModule):
    o: Tensor
    dropout: nn.Module
    layer_norm: nn.Module

    def forward(self, h: Tensor, g: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """h [T, B, d_model] is what tokens say, g [M, B, d_model] what is asked about some of them"""
        streams = {id(stream): stream for stream in (h, g) if stream is not None and stream.requires_grad}
        copied = copy_all_to_group(list(streams.values()), self.parallel.group) if streams else ()
        read = dict(zip(streams, copied, strict=True))
        return super().forward(read.get(id(h), h), read.get(id(g), g), *args, **kwargs)

    def rel_attn_core(self, *args: Any, **kwargs: Any) -> Any:
        """Dropout of the probabilities is that of this rank's heads."""
        with sharded_rng(self.parallel.group).fork() if self.training else nullcontext():
            return super().rel_attn_core(*args, **kwargs)  # type: ignore[misc]

    def post_attention(self, h: Tensor, attn_vec: Tensor, residual: bool = True) -> Tensor:
        """attn_vec [T, B, h, D] of this rank's heads, summed over the ranks. The gradient of the residual goes the way
        of the heads' gradients, which are summed too, so one rank gives it.
        """
        out = reduce_from_group(torch.einsum("ibnd,hnd->ibh", attn_vec, self.o), self.parallel.group)
        out = self.dropout(out)
        if residual:
            out = out + (h if self.parallel.rank == 0 else h.detach())
        return cast(Tensor, self.layer_norm(out))


class XLNetPolicy(Policy):
    def rules(self) -> Rules:
        layer = "layer.*"
        return {
            f"{layer}.rel_attn": RelativeHeads(),
            **mlp_rules(f"{layer}.ff", "layer_1", "layer_2"),
            f"{layer}.ff.layer_norm": "replicated",
        }
