"""torch's own attention module, `nn.MultiheadAttention`, dealt by heads.

It reads the weights of its projections itself, and takes the size of a head from the features that come in, so it has
a forward of its own here. With H heads of D features, of which a rank has h, and E = H * D:

    in_proj_weight  [3E, E] -> [3hD, E]     this rank's rows of q, of k, of v; also as three weights [E, features]
    bias_k, bias_v  [1, 1, E] -> [1, 1, hD] a key and a value behind all others
    out_proj.weight [E, E] -> [E, hD]       the outputs are summed over the ranks, its bias added once

What goes in and out is what it is in one process: masks with H heads, weights of all heads. `num_heads` stays H too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ..ops import compiled
from ..ops.collective import copy_all_to_group, gather_from_group, reduce_from_group
from ..ops.linear import row_linear
from ..spec import ParamSpec
from .attention import LocalHeadIndex, by_head
from .heads import HeadGeometry
from .layer.linear import join_name
from .layer.parallel_module import ParallelModule, native_class
from .splits import Heads
from .styles import Role, Site, Style

# Parameter -> the dim with features of heads, and in which order those lie.
_CUT: Mapping[str, tuple[int, str]] = {
    "in_proj_weight": (0, "packed"),
    "in_proj_bias": (0, "packed"),
    **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), (0, "q")),
    **dict.fromkeys(("bias_k", "bias_v"), (2, "q")),
    "out_proj.weight": (1, "q"),
}


def is_torch_attention(module: nn.Module) -> bool:
    """Whether it computes as torch's does; subclasses may not."""
    return isinstance(module, nn.MultiheadAttention) and native_class(module).forward is nn.MultiheadAttention.forward


@dataclass(frozen=True)
class TorchAttention(Style):
    """An `nn.MultiheadAttention` of which every rank computes some heads."""

    @property
    def role(self) -> Role | None:
        return "sums"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module: Any = site.module
        if site.parameter is not None or not is_torch_attention(module):
            raise ValueError(f"TorchAttention deals an nn.MultiheadAttention, this is a {type(module).__name__}")
        geometry = HeadGeometry(module.num_heads, module.num_heads)
        found = {}
        for name, param in module.named_parameters():
            shape = tuple(param.shape)
            if name in _CUT:
                dim, kind = _CUT[name]
                pieces = site.pieces(Heads(kind, geometry), shape[dim])  # type: ignore[arg-type]
                found[name] = ParamSpec(join_name(site.name, name), shape, dim, pieces)
            elif name == "out_proj.bias":
                found[name] = ParamSpec(join_name(site.name, name), shape)
            else:
                raise ValueError(f"{name} is no parameter of torch's nn.MultiheadAttention")
        return found

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        geometry, ranks = HeadGeometry(site.module.num_heads, site.module.num_heads), site.parallel.size  # type: ignore[arg-type]
        layer = _ByHeads.adopt(site.module, site.parallel)
        layer.head_index = LocalHeadIndex.of(geometry, site.parallel.rank, ranks)
        layer.heads_of_ranks = [sum(group.q_count for group in geometry.groups(rank, ranks)) for rank in range(ranks)]
        layer.group_name = compiled.name_of(site.parallel.group)


class _ByHeads(ParallelModule):
    """
    head_index      heads of this rank
    heads_of_ranks  how many of the module's heads each rank has: none where it computes one of zeros
    """

    head_index: LocalHeadIndex
    heads_of_ranks: list[int]
    group_name: str
    head_dim: int
    batch_first: bool
    dropout: float
    add_zero_attn: bool
    out_proj: nn.Linear
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        _check_call(query, key, value, key_padding_mask)
        query, key, value, attn_mask, key_padding_mask = self._entering(query, key, value, attn_mask, key_padding_mask)
        q, k, v = self._projected(query, key, value, batched)
        if is_causal and attn_mask is None:
            raise RuntimeError("nn.MultiheadAttention: is_causal=True is a hint about attn_mask=, which is missing")
        hinted = is_causal and key_padding_mask is None and not need_weights
        mask = None if hinted else self._mask(attn_mask, q.dtype)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, bias.view(1, len(self.head_index.heads), 1, -1).expand(len(x), -1, -1, -1)], 2)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        further = k.shape[2] - key.shape[1 if self.batch_first and batched else 0]
        if mask is not None and further:
            mask = F.pad(mask, (0, further))
        if key_padding_mask is not None:
            hidden = _additive(key_padding_mask if batched else key_padding_mask[None], q.dtype)
            hidden = F.pad(hidden, (0, further))[:, None, None]
            mask = hidden if mask is None else mask + hidden
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            out = weights @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, hinted)
        y = self._summed(out.transpose(1, 2).flatten(2))  # [B, L, E]
        y = y if self.batch_first else y.transpose(0, 1)
        if weights is not None:
            weights = self._of_all_heads(weights, average_attn_weights)
        if batched:
            return y, weights
        return y.squeeze(0 if self.batch_first else 1), None if weights is None else weights.squeeze(0)

    def _entering(self, *inputs: Any) -> list[Any]:
        """What a rank's heads read, whose gradients are summed over the ranks: what comes twice, once."""
        whole = {id(x): x for x in inputs if x is not None and x.requires_grad}
        if torch.compiler.is_compiling():
            copied = [compiled.copy_in(x, self.group_name) for x in whole.values()]
        else:
            copied = list(copy_all_to_group(list(whole.values()), self.parallel.group)) if whole else []
        read = dict(zip(whole, copied, strict=True))
        return [read.get(id(x), x) for x in inputs]

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
        """[B, h, L, D], [B, h, S, D], [B, h, S, D]"""
        packed = self._parameters.get("in_proj_weight")
        if packed is not None:
            of_q, of_k, of_v = packed.chunk(3)
        else:
            of_q, of_k, of_v = (self.get_parameter(f"{name}_proj_weight") for name in "qkv")
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        found = []
        for x, weight, bias in zip((query, key, value), (of_q, of_k, of_v), biases, strict=True):
            y = F.linear(x, weight, bias)
            if not batched:
                y = y[None]
            elif not self.batch_first:
                y = y.transpose(0, 1)
            found.append(y.unflatten(-1, (len(self.head_index.heads), -1)).transpose(1, 2))
        q, k, v = found
        return q, k, v

    def _mask(self, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Of [L, S], or of [B * H, L, S], what is added to the scores of this rank's heads."""
        if mask is None:
            return None
        mask = _additive(mask, dtype)
        if mask.dim() == 2:
            return mask[None, None]
        return by_head(mask, self.head_index).unflatten(0, (-1, len(self.head_index.heads)))

    def _summed(self, x: Tensor) -> Tensor:
        linear = self.out_proj
        if torch.compiler.is_compiling():
            return compiled.row_linear(x, linear.weight, linear.bias, self.group_name, False)
        return row_linear(x, linear.weight, linear.bias, self.parallel.group)

    def _of_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        """[B, L, S] on average, or [B, H, L, S], from this rank's [B, h, L, S]."""
        own = weights.narrow(1, 0, self.heads_of_ranks[self.parallel.rank])
        if average:
            return reduce_from_group(own.sum(1) / self.head_index.total, self.parallel.group)
        return gather_from_group(own, self.parallel.group, 1, self.heads_of_ranks)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is True where nothing is seen, or that is added to scores, as one that is."""
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"nn.MultiheadAttention: masks are of bool or floating point, this one is of {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


def _check_call(query: Tensor, key: Tensor, value: Tensor, padding: Tensor | None) -> None:
    dims = query.dim()
    if dims not in (2, 3) or key.dim() != dims or value.dim() != dims:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(f"nn.MultiheadAttention: query, key and value have two dims each, or three, not {shapes}")
    if padding is not None and padding.dim() != dims - 1:
        raise ValueError(f"nn.MultiheadAttention: key_padding_mask has {dims - 1} dims, not {padding.dim()}")
