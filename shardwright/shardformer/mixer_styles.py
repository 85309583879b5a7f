"""Styles for what mixers of tokens other than attention are made of: linear attention, recurrences, convolutions.

What a mixer keeps per head or per channel goes to the rank that computes it: projections, convolutions along tokens,
decays, gates, states. Counts and sizes are read from the module at hand, by the names that it has for them, so that one
description fits every size of a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..ops import compiled
from ..ops.collective import copy_to_group
from ..spec import PADDING, ParamSpec, Piece, joined_pieces
from ..utils.tensors import map_tensors
from .attention import LocalConfig, LocalHeadIndex
from .heads import HeadGeometry
from .layer.linear import output_size, require_linear
from .layer.parallel_module import ParallelModule, native_class
from .splits import Pieces, Split
from .styles import ShardedParameter, Site, Style


def number_at(module: nn.Module, path: str) -> int:
    """An attribute of the module or of what it holds ("num_heads", "config.num_heads"); ValueError where it is no
    whole number.
    """
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{type(module).__name__}.{path} is {value!r}, not a number of heads or features")
    return value


@dataclass(frozen=True)
class ByHeads:
    """Whole heads, each rank its own; ranks left over get one of zeros.

    heads   where the module around keeps the number of heads
    parts   where it keeps the sizes of what lies one after the other, each of which has all heads; () for one part
    """

    heads: str
    parts: tuple[str, ...] = ()

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        count = number_at(parent, self.heads)
        sizes = [number_at(parent, part) for part in self.parts] or [size]
        if sum(sizes) != size or any(part % count for part in sizes):
            raise ValueError(f"{size} features are not {count} heads in parts of {sizes}")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return joined_pieces(
            *(_dealt(count, part // count, start, ranks) for part, start in zip(sizes, starts, strict=True))
        )


def _dealt(heads: int, features: int, start: int, ranks: int) -> Pieces:
    """`heads` of `features` each, from index `start` on."""
    found = []
    for rank in range(ranks):
        mine = list(HeadGeometry(heads, heads).local("q", rank, ranks))
        first, count = mine[0][0], sum(length for _, length in mine)
        found.append((Piece(PADDING if first == PADDING else start + first * features, count * features),))
    return tuple(found)


@dataclass(frozen=True)
class HalfOfHeads:
    """Rows of a projection that makes the first, or the second, half of the features of all value heads: of this
    half, what lies in a rank's own heads, which may be nothing.
    """

    second: bool

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        features = number_at(parent, "head_dim")  # the counts beside it are a rank's, once the module is sharded
        heads, rest = divmod(2 * size, features)
        if rest or heads < ranks:
            raise ValueError(f"2 * {size} features are whole heads of {features} for {ranks} ranks")
        low = size * self.second
        found = []
        for (whole,) in _dealt(heads, features, 0, ranks):
            start = min(max(whole.start, low), low + size)
            end = min(max(whole.start + whole.length, low), low + size)
            found.append((Piece(start - low, end - start),))
        return tuple(found)


@dataclass(frozen=True)
class LocalSizes(Style):
    """A module around sharded parts that reads how many heads there are: its counts become those of this rank.

    heads       where it keeps the number of heads
    sizes       its attributes that are a number of heads, or of features over all of them
    config      fields of its config that are, and that its forward reads
    buffers     tensors that it computed for all heads, and the dim that runs over heads; they stay whole where they
                are kept, its forward sees this rank's
    state       an argument with states of all heads (dim 1 of tensors in a list), which the forward returns changed
    first       how many of the states at the front of the list are of whole features, not of heads
    """

    heads: str
    sizes: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    buffers: tuple[tuple[str, int], ...] = ()
    state: str | None = None
    first: int = 0

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        count = number_at(site.module, self.heads)
        for name in (*self.sizes, *(f"config.{name}" for name in self.config)):
            if number_at(site.module, name) % count:
                raise ValueError(f"{name} is no multiple of {count} heads")
        return {}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        module, rank, ranks = site.module, site.parallel.rank, site.parallel.size
        total = number_at(module, self.heads)
        index = LocalHeadIndex.of(HeadGeometry(total, total), rank, ranks)
        local = len(index.heads)
        for name in self.sizes:
            setattr(module, name, getattr(module, name) // total * local)
        if self.config:
            known = {name: number_at(module, f"config.{name}") // total * local for name in self.config}
            module.config = LocalConfig(module.config, known)  # type: ignore[assignment]
        if self.buffers or self.state:
            layer = _LocalForward.adopt(module, site.parallel)
            layer.head_index, layer.local_buffers, layer.first_state = index, self.buffers, self.first
            layer.state_place = None
            if self.state is not None:
                names = list(inspect.signature(native_class(module).forward).parameters)[1:]
                layer.state_place = (self.state, names.index(self.state))


class _LocalForward(ParallelModule):
    head_index: LocalHeadIndex
    local_buffers: tuple[tuple[str, int], ...]
    state_place: tuple[str, int] | None
    first_state: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = {name: self._buffers[name] for name, _ in self.local_buffers}
        for name, dim in self.local_buffers:
            held = whole[name]
            self._buffers[name] = None if held is None else self.head_index.select(held, dim)
        try:
            return self._with_state(*args, **kwargs)
        finally:
            self._buffers.update(whole)

    def _with_state(self, *args: Any, **kwargs: Any) -> Any:
        if self.state_place is None:
            return super().forward(*args, **kwargs)
        name, place = self.state_place
        given = kwargs.get(name) if place >= len(args) else args[place]
        if given is None:
            return super().forward(*args, **kwargs)
        local = [state if at < self.first_state else self._own(state) for at, state in enumerate(given)]
        if place < len(args):
            args = (*args[:place], local, *args[place + 1 :])
        else:
            kwargs[name] = local
        output, changed = super().forward(*args, **kwargs)
        if changed is None:
            return output, changed
        for at, (whole, before, after) in enumerate(zip(given, local, changed, strict=True)):
            if at >= self.first_state and after is not before:
                before.copy_(after)
            elif after is not before:
                whole.copy_(after)
        return output, given

    def _own(self, state: Tensor) -> Tensor:
        """A view of this rank's part of a state of all heads, whose features may lie in one dim."""
        total, heads = self.head_index.total, self.head_index.heads
        features = state.shape[1] // total
        return state.narrow(1, heads[0] * features, len(heads) * features)


@dataclass(frozen=True)
class SharedOutput(Style):
    """A module that every rank holds whole and applies to whole activations, and of whose output every rank's own
    heads compute: keys and values that all heads share. Their gradient is summed.
    """

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        super().convert(site, specs)
        share_output(site)


def share_output(site: Site) -> None:
    """Every rank goes on with the module's whole output, for heads of its own."""
    _SharedForward.adopt(site.module, site.parallel).group_name = compiled.name_of(site.parallel.group)


class _SharedForward(ParallelModule):
    group_name: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return map_tensors(self._shared, super().forward(*args, **kwargs))

    def _shared(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        if torch.compiler.is_compiling():
            return compiled.copy_in(tensor, self.group_name)
        return copy_to_group(tensor, self.parallel.group)


@dataclass(frozen=True)
class OwnOutput(Style):
    """A small linear that every rank holds whole, and of whose output features it takes those of its own heads, which
    may be none: no shard is empty this way. The gradient of the output is put together.
    """

    split: Split

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        require_linear(site.module, "OwnOutput")
        site.pieces(self.split, output_size(site.module))
        return super().specs(site)

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        (own,) = site.pieces(self.split, output_size(site.module))[site.parallel.rank]
        super().convert(site, specs)
        _OwnForward.adopt(site.module, site.parallel).own = own


class _OwnForward(ParallelModule):
    own: Piece

    def forward(self, x: Tensor) -> Tensor:
        return copy_to_group(super().forward(x), self.parallel.group).narrow(-1, self.own.start, self.own.length)


def of_heads(heads: str, dim: int = 0) -> ShardedParameter:
    """A parameter with something for each head, or for each feature of all of them."""
    return ShardedParameter(dim, ByHeads(heads))
