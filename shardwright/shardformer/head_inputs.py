"""Attention that wants more than projections by heads.

Dealt rows      y = own part of (sum over ranks of x_k W_k^T) + b: a linear that reads what all heads hold, and makes
                numbers for each
Narrow input    a forward that takes the features of all heads for as many as its input has: it is given a view as
                wide as this rank's heads, and its column linears the whole
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import even_sizes
from ..ops import compiled, compiled_sequence
from ..ops.collective import split_to_group
from ..spec import ParamSpec
from .attention import LocalHeads, source_of_forward
from .heads import HeadGeometry
from .layer.linear import output_size
from .layer.parallel_module import ParallelModule
from .layer.sequence import first_tensor, with_first
from .splits import Heads, Split
from .styles import Column, Role, Row, Site

_KEYS = Heads("kv")
_WHOLE = "_shardwright_whole"
_READ_WIDTH = re.compile(r"(\w+) = hidden_states\.(?:size\(\)|shape)\n")


@dataclass(frozen=True)
class DealtRow(Row):
    """A row linear of which every rank keeps the outputs of its own heads.

    outputs     how they are dealt
    """

    outputs: Split = _KEYS

    @property
    def role(self) -> Role | None:
        return "inside"

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        size, ranks = output_size(site.module), site.parallel.size
        dealt = [sum(piece.length for piece in pieces) for pieces in site.pieces(self.outputs, size)]
        if dealt != even_sizes(size, ranks):
            raise ValueError(f"{size} outputs, one for a head, are not dealt to {ranks} ranks by whole heads")
        return super().specs(site)

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        size = output_size(site.module)
        super().convert(site, specs)
        own = _OwnOutputs.adopt(site.module, site.parallel)
        own.sizes, own.group_name = even_sizes(size, site.parallel.size), compiled.name_of(site.parallel.group)


class _OwnOutputs(ParallelModule):
    sizes: list[int]
    group_name: str

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        if torch.compiler.is_compiling():
            return compiled_sequence.split_sequence(y, self.group_name, y.dim() - 1)
        return split_to_group(y, self.parallel.group, -1, self.sizes)


@dataclass(frozen=True)
class NarrowInput(LocalHeads):
    """See above; for attention whose input is as wide as its heads together."""

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        geometry = self.geometry or HeadGeometry.of(site.module)
        heads = geometry.local_heads(site.parallel.rank, site.parallel.size)
        narrow = _Narrowed.adopt(site.module, site.parallel)
        narrow.heads, narrow.all_heads = heads, geometry.num_heads


@dataclass(frozen=True)
class WideColumn(Column):
    """A column linear of such attention."""

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        _TakesWhole.adopt(site.module, site.parallel)


class _Narrowed(ParallelModule):
    heads: int
    all_heads: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            compiled_sequence.no_graph("attention is given a view of its input, and its linears the whole")
        x = first_tensor(args, kwargs)
        if x.shape[-1] % self.all_heads:
            raise ValueError(f"{x.shape[-1]} features are not those of {self.all_heads} heads")
        narrow = x[..., : x.shape[-1] // self.all_heads * self.heads]
        setattr(narrow, _WHOLE, x)
        args, kwargs = with_first(lambda _: narrow, args, kwargs)
        return super().forward(*args, **kwargs)


class _TakesWhole(ParallelModule):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(getattr(x, _WHOLE, x))
        return y


def reads_width(module: nn.Module) -> bool:
    """Whether the forward shapes what its heads return by the features of its input."""
    source = source_of_forward(module)
    found = _READ_WIDTH.search(source)
    return found is not None and re.search(rf"(?:reshape|view)\([^()]*\b{found[1]}\)", source) is not None
