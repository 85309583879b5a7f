"""Norms over the features of all heads, or of a whole MLP, of which a rank has some.

    y = x / sqrt(sum over all features of x^2 / n + eps) * (offset + weight)

A rank adds up the squares of its own features [..., n_k]; one number per token travels. The weight [n] is dealt like
the features. Families round in different orders on the way; in less than single precision results may differ in the
last bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn as nn

from ..ops.collective import copy_to_group, reduce_from_group
from ..spec import ParamSpec
from .layer.norm import epsilon_of, rms_offset
from .layer.parallel_module import ParallelModule
from .splits import EVEN, Split
from .styles import Role, Site, Style


@dataclass(frozen=True)
class WideNorm(Style):
    """An RMS norm over features that are dealt to the ranks.

    split   how the features are dealt; no feature may be on two ranks, as it would count twice
    """

    split: Split = EVEN

    @property
    def role(self) -> Role | None:
        return "inside"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        weight = weight_of(site.module) if site.parameter is None else None
        if weight is None or rms_offset(site.module) is None:
            raise ValueError("WideNorm applies to an RMS norm with one weight")
        pieces = site.pieces(self.split, weight.shape[0])
        held = sum(piece.length for rank in pieces for piece in rank if not piece.is_padding)
        if held != weight.shape[0]:
            raise ValueError("features that several ranks hold would count more than once in the norm")
        return {"weight": ParamSpec(f"{site.name}.weight", tuple(weight.shape), 0, pieces)}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        offset = rms_offset(site.module)
        assert offset is not None
        super().convert(site, specs)
        norm = _WideNorm.adopt(site.module, site.parallel)
        norm.offset, norm.features = offset, specs["weight"].full_shape[0]


class _WideNorm(ParallelModule):
    is_wide = True
    offset: float
    features: int
    weight: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = reduce_from_group(wide.square().sum(-1, keepdim=True), self.parallel.group)
        squares = copy_to_group(squares, self.parallel.group)  # every rank's features depend on it
        normal = wide * torch.rsqrt(squares / self.features + epsilon_of(self))
        if self.offset:
            return (normal * (self.offset + self.weight.float())).to(x.dtype)
        return self.weight * normal.to(x.dtype)


def weight_of(norm: nn.Module) -> torch.Tensor | None:
    """The one parameter of a norm, None for what has others."""
    params = dict(norm.named_parameters())
    weight = params.get("weight")
    return weight if len(params) == 1 and weight is not None and weight.ndim == 1 else None
