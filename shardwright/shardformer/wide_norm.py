"""Norms over the features of all heads or channels, or of a whole MLP, of which a rank has some.

    y = x / sqrt(sum over all features of x^2 / n + eps) * (offset + weight)

A rank adds up the squares of its own features [..., n_k]; one number per token travels. The weight [n] is dealt like
the features, and its gradient with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from ..ops import compiled
from ..spec import ParamSpec
from .dealt_rows import DealtRows
from .layer.parallel_module import native_class, shard_parameters
from .layer.wide_norm import NormOverRanks
from .styles import Site


@dataclass(frozen=True)
class WideNorm(DealtRows):
    """An RMS norm over features that are dealt to the ranks, all together or in groups, with one weight per feature.

    Ranks that have whole groups compute theirs alone; ranks that share one sum their squares.

    split   how the features are dealt; no feature may be on two ranks, as it would count twice
    """

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        is_other = site.parameter is not None or isinstance(site.module, nn.LayerNorm)
        if is_other or weight_of(site.module) is None:
            raise ValueError("WideNorm applies to an RMS norm with one weight")
        return super().specs(site)

    def _check(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        spec = specs["weight"]
        held = sum(piece.length for rank in spec.pieces for piece in rank if not piece.is_padding)
        if held != spec.full_shape[0]:
            raise ValueError("features that several ranks hold would count more than once in the norm")
        _groups_of(site.module, spec)

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        module: Any = site.module
        spec, rank = specs["weight"], site.parallel.rank
        size, groups = _group_size(module, spec), _groups_of(module, spec)
        shard_parameters(module, specs, rank)
        features, own = module.weight.shape[0], groups[rank]
        for name, number in (("n_groups", len(own)), ("group_size", features // len(own))):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, number)
        if sum(map(len, groups)) > len(set().union(*groups)):  # what one rank must sum, all take part in
            norm = NormOverRanks.adopt(module, site.parallel)
            norm.group_count, norm.own_group = spec.full_shape[0] // size, own[0]
            norm.features, norm.share = features, features / size
            norm.group_name = compiled.name_of(site.parallel.group)


def _group_size(norm: nn.Module, spec: ParamSpec) -> int:
    """Features that the whole norm takes together."""
    size, count = getattr(norm, "group_size", None), getattr(norm, "n_groups", None)
    return size if isinstance(size, int) else spec.full_shape[0] // (count if isinstance(count, int) else 1)


def _groups_of(norm: nn.Module, spec: ParamSpec) -> list[range]:
    """For every rank, which groups it has features of: one, of which it may have a part, or several whole ones;
    ValueError for anything else.
    """
    size = _group_size(norm, spec)
    if size == spec.full_shape[0]:
        return [range(1)] * len(spec.pieces)
    found, is_cut = [], False
    for pieces in spec.pieces:
        start, end = pieces[0].start, pieces[-1].start + pieces[-1].length
        found.append(range(start // size, -(-end // size)))
        is_cut |= bool(start % size or end % size)
    for rank, (groups, pieces) in enumerate(zip(found, spec.pieces, strict=True)):
        if (is_cut and len(groups) > 1) or len(pieces) > 1 or pieces[0].is_padding:
            raise ValueError(
                f"rank {rank} of {len(found)} would have {spec.local_shape(rank)[0]} of {spec.full_shape[0]} features, "
                f"of several groups of {size} that {native_class(norm).__name__} norms, where groups are cut; use a "
                "number of ranks that does not cut groups apart"
            )
    return found


def weight_of(norm: nn.Module) -> torch.Tensor | None:
    """The one parameter of a norm, None for what has others."""
    params = dict(norm.named_parameters())
    weight = params.get("weight")
    return weight if len(params) == 1 and weight is not None and weight.ndim == 1 else None
