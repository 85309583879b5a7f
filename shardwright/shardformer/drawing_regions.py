"""Regions that draw random numbers of each rank's own (see `rng`): what their modules do where they begin and end.

Of classes and not of hooks: torch.compile looks at hooks one by one, and layers would not share a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from ..ops.compiled_numbers import CLOSE, OPEN, at_first
from .layer.parallel_module import ParallelGroup, ParallelModule
from .layer.sequence import with_first
from .rng import ShardedRng, sharded_rng


class _Draws(ParallelModule):
    _numbers: str

    @classmethod
    def adopt(cls, module: nn.Module, parallel: ParallelGroup) -> Self:
        adopted = super().adopt(module, parallel)
        adopted._numbers = sharded_rng(parallel.group).name
        return adopted

    @property
    def _rng(self) -> ShardedRng:
        return sharded_rng(self.parallel.group)


class _OpensBehind(_Draws):
    """Its output is the first sharded activation."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.training:
            return output
        if torch.compiler.is_compiling():
            return at_first(output, self._numbers, OPEN)
        self._rng.open()
        return output


class _ClosesBehind(_Draws):
    """Its output is whole again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            return at_first(output, self._numbers, CLOSE)
        self._rng.close()
        return output


class _Ends(_Draws):
    """Around a region, which ends with it whatever happens: recomputation under activation checkpointing may leave a
    forward by an exception once it has all it needs.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return at_first(super().forward(*args, **kwargs), self._numbers, CLOSE)
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._rng.close()


class _OpensAtEntry(_Draws):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training and torch.compiler.is_compiling():
            args, kwargs = with_first(lambda x: at_first(x, self._numbers, OPEN), args, kwargs)
        elif self.training:
            self._rng.open()
        return super().forward(*args, **kwargs)


def make_sharded_region(
    module: nn.Module, group: dist.ProcessGroup, opens: Sequence[nn.Module], closes: Sequence[nn.Module] = ()
) -> None:
    """Let the forward of `module` draw per-rank numbers, in training.

    opens    descendants whose output is the first sharded activation (column linears); or `module`: the region opens as
             it is entered
    closes   descendants whose output is replicated again (row linears); whatever happens, the region ends with `module`
    """
    parallel = ParallelGroup(group)
    for child in opens:
        if child is not module:
            _OpensBehind.adopt(child, parallel)
    for child in closes:
        if child is not module:
            _ClosesBehind.adopt(child, parallel)
    if any(child is module for child in opens):
        _OpensAtEntry.adopt(module, parallel)
    _Ends.adopt(module, parallel)
