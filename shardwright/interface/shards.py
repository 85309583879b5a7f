"""The contract between optimizers and checkpoints: which part of which parameter's master and state a rank owns.

Every optimizer of this package lists its parts as `ParamShard`s, in whatever way it stores them, and takes them back by
name. A checkpoint can so be written without communication (every rank writes what it owns) and read under any other
layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..spec import ParamSpec


@dataclass(frozen=True)
class ParamShard:
    """A contiguous part of one parameter's local tensor (this rank's tensor-parallel shard), and what belongs to it.

    name        full name, the one that checkpoints use
    spec        layout of the parameter over the model axes
    local_shape shape of the local tensor
    start, stop flat, row-major range of the local tensor that this rank holds
    group       number of the optimizer's param group
    master      [stop - start] the weights that the optimizer steps on: a live view, writing to it changes the
                optimizer's weights (call `publish_masters` afterwards)
    state       per-element optimizer state, each [stop - start] and a live view ("exp_avg", ...); empty before the
                first step
    extra       optimizer state that is not per element, by value or live view: step counts, Adafactor's row and column
                means (only with start, stop covering the whole local tensor)
    is_writer   whether this rank, of all that hold the same range, is the one to save it
    """

    name: str
    spec: ParamSpec
    local_shape: tuple[int, ...]
    start: int
    stop: int
    group: int
    master: torch.Tensor
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    is_writer: bool = True

    @property
    def is_whole(self) -> bool:
        size = 1
        for length in self.local_shape:
            size *= length
        return self.start == 0 and self.stop == size


@dataclass(frozen=True)
class LoadedShard:
    """Values for one `ParamShard`: `master` and every entry of `state` have as many elements as the range; None
    keeps the master.
    """

    master: torch.Tensor | None
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)


class ShardedOptimizer(Protocol):
    """What checkpoints and the booster ask of an optimizer that steps on masters of its own. The wrapper that boost
    returns says by `OptimizerWrapper.sharded` who answers.
    """

    def trained(self) -> dict[str, int]:
        """Number of the param group of every parameter that is trained, by the name that checkpoints use."""
        ...

    def shards(self) -> list[ParamShard]:
        """What this rank owns of every parameter."""
        ...

    def load_shards(self, loaded: Mapping[str, LoadedShard]) -> None:
        """Take masters and states, by parameter name, for exactly the ranges that `shards` lists; then bring the
        masters into the model. Collective.
        """
        ...

    def publish_masters(self) -> None:
        """Bring masters that were written to into the working parameters of all ranks. Collective."""
        ...

    def refresh_masters(self) -> None:
        """Take masters from the working parameters as they are."""
        ...


@dataclass(frozen=True)
class KeptShard:
    """What a rank keeps of a parameter that is gathered only while it is used (ZeRO stage 3).

    start, stop  flat, row-major range of the local tensor
    is_first     whether this rank is the first of those that keep this range
    read         gives its elements, flat: a live view, to be read or written before the model runs again
    """

    start: int
    stop: int
    is_first: bool
    read: Callable[[], torch.Tensor]


_ATTRIBUTE = "_shardwright_kept"


def keep_shard(param: torch.Tensor, shard: KeptShard | None) -> None:
    setattr(param, _ATTRIBUTE, shard)


def kept_shard(param: torch.Tensor) -> KeptShard | None:
    """None for a parameter that this rank has whole."""
    return getattr(param, _ATTRIBUTE, None)
