"""Convolutions and norms over channels of which a rank has some.

Shapes, with samples N, positions P in any number of trailing dims (pixels, frames), O and I channels of all ranks, o
and i this rank's, kernels K:

    column   x [N, I, P] replicated      W [o, I, K]    b [o]    y [N, o, P'], or [N, O, P'] when gathered
    row      x [N, i, P] this rank's     W [O, i, K]    b [O]    y [N, O, P'] replicated
    groups   x [N, i, P] this rank's     W [o, I/g, K]  b [o]    y [N, o, P'], whole groups on every rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.nn as nn
from torch import Tensor

from ...comm.collectives import all_gather
from ...comm.quantised_wire import exact_group
from ...ops import compiled
from ...ops.collective import copy_to_group, reduce_from_group, split_to_group
from ...ops.compiled_sequence import no_graph
from ...spec import ParamSpec
from ..rng import OWN, sharded_rng
from ..splits import Pieces
from .linear import gather_features
from .parallel_module import ParallelGroup, ParallelModule, shard_parameters

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_convolution(module: nn.Module) -> bool:
    """Whether it is one whose weight is a parameter, and none that a parametrization computes from others."""
    return isinstance(module, CONVOLUTIONS) and isinstance(module._parameters.get("weight"), nn.Parameter)


def is_grouped(module: nn.Module) -> bool:
    return is_convolution(module) and int(module.groups) > 1  # type: ignore[arg-type]


def channel_dim(module: nn.Module) -> int:
    """Where the channels of what a convolution reads and writes are, with samples in front or without."""
    return 1 - module.get_parameter("weight").ndim


class _Convolution(ParallelModule):
    """
    pieces      channels of every rank, as they lie in the whole tensor: of outputs, for `row` of inputs
    """

    pieces: Pieces
    _group_name: str

    @classmethod
    def shard(
        cls, module: nn.Module, parallel: ParallelGroup, specs: dict[str, ParamSpec], pieces: Pieces | None = None
    ) -> Self:
        groups = getattr(module, "groups", 1)
        rows = module.get_parameter("weight").shape[0] // groups  # output channels of a group
        shard_parameters(module, specs, parallel.rank)
        layer = cls.adopt(module, parallel)
        layer.pieces = specs["weight"].pieces if pieces is None else pieces
        layer._group_name = compiled.name_of(parallel.group)
        own: Any = layer
        weight = own.weight
        own.groups = 1 if groups == 1 else weight.shape[0] // rows
        own.in_channels, own.out_channels = weight.shape[1] * own.groups, weight.shape[0]
        return layer

    def _copied(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return compiled.copy_in(x, self._group_name)
        return copy_to_group(x, self.parallel.group)

    def _summed(self, y: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return compiled.sum_out(y, self._group_name)
        return reduce_from_group(y, self.parallel.group)

    @property
    def _sizes(self) -> list[int]:
        return [sum(piece.length for piece in rank) for rank in self.pieces]


class ColumnConvolution(_Convolution):
    """Output channels are dealt to the ranks.

    gather_output   hand on all channels on every rank
    """

    gather_output = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        y = super().forward(self._copied(x), *args, **kwargs)
        return gather_features(y, self.pieces, self.parallel.group, channel_dim(self)) if self.gather_output else y


class RowConvolution(_Convolution):
    """Input channels are dealt to the ranks; what they compute is summed, and the bias is added once.

    split_input     the input arrives whole; keep this rank's channels of it
    """

    split_input = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.split_input:
            x = split_to_group(x, self.parallel.group, channel_dim(self), self._sizes)
        bias, self._parameters["bias"] = self._parameters.get("bias"), None
        try:
            y = self._summed(super().forward(x, *args, **kwargs))
        finally:
            self._parameters["bias"] = bias
        return y if bias is None else y + bias.view(-1, *[1] * (-channel_dim(self) - 1)).to(y.dtype)


class GroupedConvolution(_Convolution):
    """Whole groups of channels are dealt to the ranks, of inputs and outputs alike, so nothing travels.

    gather_output   the input arrives whole, and the output is handed on whole
    """

    gather_output = False
    input_sizes: list[int]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        group, dim = self.parallel.group, channel_dim(self)
        if not self.gather_output:
            return super().forward(x, *args, **kwargs)
        y = super().forward(split_to_group(x, group, dim, self.input_sizes), *args, **kwargs)
        return gather_features(y, self.pieces, group, dim)


class ChannelNorm(ParallelModule):
    """A norm that sees this rank's channels, with buffers for the channels of all ranks: where its forward moves them
    (running statistics), ranks tell each other what theirs have become, so that every rank evaluates, saves and goes
    on with the same buffers.

    own     start and length of this rank's channels
    moves   whether training moves the buffers
    """

    own: tuple[int, int]
    sizes: Sequence[int]
    channel_buffers: tuple[str, ...]
    moves: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.channel_buffers:
            return super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            no_graph("a norm puts this rank's part in the place of its buffers")
        whole = {name: self._buffers[name] for name in self.channel_buffers}
        parts = {name: buffer.narrow(0, *self.own) for name, buffer in whole.items() if buffer is not None}
        self._buffers.update(parts)
        try:
            y = super().forward(*args, **kwargs)
        finally:
            self._buffers.update(whole)
        if self.training and self.moves:
            self._exchange(whole, parts)
        return y

    @torch.no_grad()
    def _exchange(self, whole: dict[str, Tensor | None], parts: dict[str, Tensor]) -> None:
        rows = torch.stack(list(parts.values()))
        gathered = all_gather(rows, exact_group(self.parallel.group), 1, self.sizes)
        for name, row in zip(parts, gathered, strict=True):
            buffer = whole[name]
            assert buffer is not None
            buffer.data.copy_(row)  # backward keeps the buffer, which it does not read, and must not see it change


class OwnNumbers(ParallelModule):
    """A dropout whose input is this rank's channels: ranks draw masks of their own."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:  # type: ignore[attr-defined]
            return super().forward(x)  # type: ignore[misc,no-any-return]
        if torch.compiler.is_compiling():
            no_graph("a dropout looks up the numbers of its process group as it runs")
        with sharded_rng(self.parallel.group).between(OWN):
            return super().forward(x)  # type: ignore[misc,no-any-return]
