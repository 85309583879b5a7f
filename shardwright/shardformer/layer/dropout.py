"""Dropout layers that say what they drop from: this rank's part of an activation, or all of it."""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from ...ops.compiled_numbers import BEGIN, END, switch_numbers
from ...ops.compiled_sequence import no_graph
from ..rng import OWN, SHARED, ShardedRng, sharded_rng
from .parallel_module import Groups, ParallelGroup, ParallelModule, constructor, group_or_all


class _Dropout(ParallelModule, nn.Dropout):
    """process_group None is all ranks, looked up when the layer first runs."""

    @constructor
    def __init__(self, p: float = 0.5, inplace: bool = False, process_group: Groups | None = None) -> None:
        nn.Dropout.__init__(self, p, inplace)
        self._parallel = None if process_group is None else ParallelGroup(group_or_all(process_group))
        self._numbers = None if process_group is None else self._rng.name

    @classmethod
    def _from_native(cls, module: nn.Module, parallel: ParallelGroup) -> Self:
        if not isinstance(module, nn.Dropout):
            raise ValueError(f"{cls.__name__} takes nn.Dropout, not {type(module).__name__}")
        return cls(module.p, module.inplace, parallel.group).train(module.training)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return group_or_all(None) if self._parallel is None else self._parallel.group

    @property
    def _rng(self) -> ShardedRng:
        return sharded_rng(self.process_group)

    def _drawing(self, numbers: str, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            with self._rng.between(numbers):
                return nn.Dropout.forward(self, x)
        if self._numbers is None:
            no_graph("a dropout looks up its process group as it runs")
            return nn.Dropout.forward(self, x)
        x = nn.Dropout.forward(self, switch_numbers(x, self._numbers, BEGIN + numbers))
        return switch_numbers(x, self._numbers, END + numbers)


class DropoutForParallelInput(_Dropout):
    """Dropout on a sharded activation: every rank of `process_group` has its own mask.

    in_region   draw what the place of the layer has every layer draw. Of a policy's, which may put one where
                activations are whole (see `shardformer.dropouts`)
    """

    in_region = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.in_region:
            return super().forward(x)
        return self._drawing(OWN, x)


class DropoutForReplicatedInput(_Dropout):
    """Dropout on a replicated activation: all ranks of `process_group` have the same mask, inside a sharded region
    too.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return super().forward(x)
        return self._drawing(SHARED, x)
