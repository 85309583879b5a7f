"""Attention modules that compute this rank's heads only: counts they read, arguments they get per head, rules for
their parts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn

from ..models.config import KEY_VALUE_HEADS, QUERY_HEADS
from ..spec import PADDING, ParamSpec
from ..utils.tensors import numbers_for
from .heads import HEADS_PER_KEY, HeadGeometry
from .layer.parallel_module import ParallelModule, native_class, own_forward
from .styles import Site, Style

Slicer = Callable[[torch.Tensor, "LocalHeadIndex"], torch.Tensor]


@dataclass(frozen=True)
class LocalHeads(Style):
    """The attention module around sharded projections: its head counts become those of this rank.

    geometry    None reads the counts from the module
    sizes       attributes that are a number of features over all heads, to be divided likewise
    config      whether the forward reads head counts from `self.config`; None looks into its source
    arguments   arguments that come with values for all heads -> function that keeps this rank's
    of_width    whether the forward divides the features of the whole layer by its count of query heads, to know the
                size of one
    """

    geometry: HeadGeometry | None = None
    sizes: tuple[str, ...] = ()
    config: bool | None = None
    arguments: Mapping[str, Slicer] = field(default_factory=dict, hash=False)
    of_width: bool = False

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        if site.parameter is not None:
            raise ValueError("LocalHeads applies to an attention module, but the rule names a parameter")
        _ = self.geometry or HeadGeometry.of(site.module)
        return {}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        module, rank, ranks = site.module, site.parallel.rank, site.parallel.size
        geometry = self.geometry or HeadGeometry.of(module)
        heads, kv_heads = geometry.local_heads(rank, ranks), geometry.local_kv_heads(rank, ranks)
        divisor = LocalCount(heads, geometry.num_heads) if self.of_width else heads
        replaced = dict.fromkeys(QUERY_HEADS, (geometry.num_heads, divisor))
        replaced |= dict.fromkeys(KEY_VALUE_HEADS, (geometry.num_kv_heads, kv_heads))
        replaced |= dict.fromkeys(HEADS_PER_KEY, (geometry.heads_per_key, heads // kv_heads))
        for name, (full, local) in replaced.items():
            if module.__dict__.get(name) == full:
                setattr(module, name, local)
        for name in self.sizes:
            setattr(module, name, getattr(module, name) // geometry.num_heads * heads)
        if self.config if self.config is not None else _reads_counts_from_config(module):
            known = {
                name: local for name, (full, local) in replaced.items() if getattr(module.config, name, None) == full
            }
            module.config = LocalConfig(module.config, known)  # type: ignore[assignment]
        if self.arguments:
            layer = _LocalArguments.adopt(module, site.parallel)
            names = list(inspect.signature(native_class(module).forward).parameters)[1:]
            layer.slicers = {name: (names.index(name), slicer) for name, slicer in self.arguments.items()}
            layer.head_index = LocalHeadIndex.of(geometry, rank, ranks)


class LocalCount(int):
    """This rank's heads, by which features of all heads are divided as by all heads: features // count is the size of
    one.
    """

    whole: int

    def __new__(cls, local: int, whole: int) -> LocalCount:
        count = super().__new__(cls, local)
        count.whole = whole
        return count

    def __rfloordiv__(self, features: int) -> int:
        return features // self.whole

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalCount, (int(self), self.whole)


@dataclass(frozen=True)
class LocalHeadIndex:
    """Query heads of this rank by their global index; padded heads repeat the first one, whatever they compute is
    dropped.
    """

    total: int
    heads: tuple[int, ...]

    @classmethod
    def of(cls, geometry: HeadGeometry, rank: int, ranks: int) -> LocalHeadIndex:
        heads: list[int] = []
        for start, length in geometry.local("q", rank, ranks):
            heads += [0] * length if start == PADDING else range(start, start + length)
        return cls(geometry.num_heads, tuple(heads))

    def select(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's heads of `x`, whose `dim` runs over all heads; other sizes (1 for all) are left alone."""
        if x.shape[dim] != self.total:
            return x
        first, count = self.heads[0], len(self.heads)
        if self.heads == tuple(range(first, first + count)):
            return x.narrow(dim, first, count)
        return x.index_select(dim, numbers_for(x, self.heads))


def by_head(x: torch.Tensor, index: LocalHeadIndex) -> torch.Tensor:
    """This rank's heads of a mask or position bias: [B, heads, ...] or [B * heads, ...]."""
    if x.ndim == 4:
        return index.select(x, 1)
    return index.select(x.unflatten(0, (-1, index.total)), 1).flatten(0, 1)


class _LocalArguments(ParallelModule):
    slicers: dict[str, tuple[int, Slicer]]
    head_index: LocalHeadIndex

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name, (position, slicer) in self.slicers.items():
            if kwargs.get(name) is not None:
                kwargs[name] = slicer(kwargs[name], self.head_index)
            elif position < len(args) and args[position] is not None:
                args = (*args[:position], slicer(args[position], self.head_index), *args[position + 1 :])
        return super().forward(*args, **kwargs)


class LocalConfig:
    """A model's config as one module sees it: head counts of this rank, everything else the shared original's."""

    __slots__ = ("_config", "_local")

    def __init__(self, config: Any, local: dict[str, int]) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_local", local)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        local = object.__getattribute__(self, "_local")
        return local[name] if name in local else getattr(object.__getattribute__(self, "_config"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalConfig, (self._config, self._local)


def _reads_counts_from_config(module: nn.Module) -> bool:
    source = source_of_forward(module)
    return any(f"config.{name}" in source for name in QUERY_HEADS + KEY_VALUE_HEADS)


def divides_width(module: nn.Module) -> bool:
    """Whether the forward divides something by its count of heads."""
    source = source_of_forward(module)
    return any(f"// self.{name}" in source for name in QUERY_HEADS)


def takes(module: nn.Module, argument: str) -> bool:
    """Whether the forward has an argument of this name."""
    return argument in inspect.signature(own_forward(module)).parameters


def source_of_forward(module: nn.Module) -> str:
    return _source_of(own_forward(module))


@lru_cache(maxsize=64)  # modules of one class have one forward
def _source_of(function: Any) -> str:
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
