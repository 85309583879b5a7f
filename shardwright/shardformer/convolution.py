"""Styles of convolutions by channels, and of what lies between two of them.

    ConvColumn, ConvRow     a pair: the first deals its output channels, the second sums over its input channels
    ConvGroups              a grouped or depthwise convolution, by whole groups
    ChannelNorms            a norm that computes each channel, or each group of channels, by itself, with its buffers
    OwnDropout              a dropout on a rank's own channels

`inferred` proposes them for what autograd finds (see `feeding`); a plan may name them too. Where channels are dealt
differently from what is between, the plan fails its check, or raises here where numbers do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from ..spec import ParamSpec
from .layer.convolution import (
    ChannelNorm,
    ColumnConvolution,
    GroupedConvolution,
    OwnNumbers,
    RowConvolution,
    is_convolution,
)
from .layer.linear import join_name, shape_of
from .layer.parallel_module import shard_parameters
from .splits import EVEN, Even, Pieces, Split
from .styles import Site, Style


def _specs(site: Site, dim: int, pieces: Pieces) -> dict[str, ParamSpec]:
    """Of weight and bias; the bias goes with the outputs, dim 0."""
    module = site.module
    specs = {"weight": ParamSpec(join_name(site.name, "weight"), shape_of(module), dim, pieces)}
    if module.bias is not None:
        shape = shape_of(module, "bias")
        name = join_name(site.name, "bias")
        specs["bias"] = ParamSpec(name, shape) if dim else ParamSpec(name, shape, 0, pieces)
    return specs


def _require_convolution(site: Site, style: Style, grouped: bool) -> Any:
    module: Any = site.module
    if site.parameter is not None or not is_convolution(module):
        raise ValueError(
            f"{type(style).__name__} deals channels of nn.Conv1d, nn.Conv2d and nn.Conv3d with a weight of their own, "
            f"not {type(module).__name__}"
        )
    if (module.groups > 1) is not grouped:
        wanted = "ConvColumn or ConvRow" if grouped else "ConvGroups"
        raise ValueError(f"{type(style).__name__}: the convolution has groups={module.groups}; use {wanted}")
    return module


@dataclass(frozen=True)
class ConvColumn(Style):
    """Convolution whose output channels are dealt to the ranks.

    split           how they are dealt
    gather_output   whether every rank gets all of them
    """

    split: Split = EVEN
    gather_output: bool = False

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _require_convolution(site, self, grouped=False)
        return _specs(site, 0, site.pieces(self.split, module.out_channels))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        layer = ColumnConvolution.shard(site.module, site.parallel, dict(specs))
        layer.gather_output = self.gather_output


@dataclass(frozen=True)
class ConvRow(Style):
    """Convolution whose input channels are dealt to the ranks; the outputs are summed.

    split_input     whether the input arrives whole
    """

    split: Split = EVEN
    split_input: bool = False

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _require_convolution(site, self, grouped=False)
        return _specs(site, 1, site.pieces(self.split, module.in_channels))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        layer = RowConvolution.shard(site.module, site.parallel, dict(specs))
        layer.split_input = self.split_input


@dataclass(frozen=True)
class ConvGroups(Style):
    """Grouped convolution whose groups are dealt to the ranks, with their inputs and outputs.

    split           how its input channels, and with them the groups, are dealt
    gather_output   whether whole channels come in and go out
    """

    split: Split = EVEN
    gather_output: bool = False

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module = _require_convolution(site, self, grouped=True)
        return _specs(site, 0, _scaled(self._inputs(site), module.out_channels, module.in_channels))

    def _inputs(self, site: Site) -> Pieces:
        module: Any = site.module
        pieces = site.pieces(self.split, module.in_channels)
        width = module.in_channels // module.groups
        if not any(piece.start % width or piece.length % width for rank in pieces for piece in rank):
            return pieces
        if self.gather_output:
            return site.pieces(Even(width), module.in_channels)
        raise ValueError(f"groups of {width} channels cannot be cut apart")

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        inputs = self._inputs(site)
        layer = GroupedConvolution.shard(site.module, site.parallel, dict(specs))
        layer.gather_output = self.gather_output
        layer.input_sizes = [sum(piece.length for piece in rank) for rank in inputs]


def _scaled(pieces: Pieces, outputs: int, inputs: int) -> Pieces:
    """The same for as many channels more or fewer, group by group."""
    return tuple(
        tuple(
            piece._replace(start=piece.start * outputs // inputs, length=piece.length * outputs // inputs)
            for piece in rank
        )
        for rank in pieces
    )


_NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    *(nn.GroupNorm, nn.PReLU),
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def is_by_channel(module: nn.Module) -> bool:
    """Whether it computes each channel, or each group of channels, by itself, from parameters and buffers with one
    number for each channel alone.
    """
    tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.ndim)]
    if not tensors or any(tensor.ndim != 1 or len(tensor) != len(tensors[0]) for tensor in tensors):
        return False
    frozen = not any(True for _ in module.parameters()) and hasattr(module, "running_var")  # all in buffers
    return isinstance(module, _NORMS) or frozen


@dataclass(frozen=True)
class ChannelNorms(Style):
    """Norm over samples and positions, or over groups of channels, on a rank's own channels."""

    split: Split = EVEN

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        module: Any = site.module
        if site.parameter is not None or not is_by_channel(module):
            raise ValueError(
                f"ChannelNorms deals norms that compute channels by themselves, not {type(module).__name__}"
            )
        width = self._channels(site) // getattr(module, "num_groups", self._channels(site))
        pieces = self._pieces(site)
        for rank in pieces:
            if len(rank) != 1 or rank[0].is_padding or rank[0].start % width or rank[0].length % width:
                raise ValueError(f"channels are dealt in one run of whole groups of {width}, not as {rank}")
        return {
            name: ParamSpec(join_name(site.name, name), tuple(param.shape), 0, pieces)
            for name, param in module.named_parameters()
        }

    def _channels(self, site: Site) -> int:
        module = site.module
        tensors = [*module.parameters(), *(buffer for buffer in module.buffers() if buffer.ndim)]
        return len(tensors[0])

    def _pieces(self, site: Site) -> Pieces:
        return site.pieces(self.split, self._channels(site))

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        module: Any = site.module
        channels, pieces = self._channels(site), self._pieces(site)
        shard_parameters(module, specs, site.parallel.rank)
        layer = ChannelNorm.adopt(module, site.parallel)
        (own,) = pieces[site.parallel.rank]
        layer.own, layer.sizes = (own.start, own.length), [rank[0].length for rank in pieces]
        layer.channel_buffers = tuple(name for name, buffer in module.named_buffers() if buffer.ndim)
        layer.moves = bool(getattr(module, "track_running_stats", False))
        for name in ("num_features", "num_channels"):
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, own.length)
        if isinstance(module, nn.GroupNorm):
            module.num_groups = own.length * module.num_groups // channels


@dataclass(frozen=True)
class OwnDropout(Style):
    """Dropout on a rank's own channels, for which it draws numbers of its own."""

    def specs(self, site: Site) -> dict[str, ParamSpec]:
        if site.parameter is not None or not is_dropout(site.module):
            raise ValueError(f"OwnDropout applies to dropouts of torch, not {type(site.module).__name__}")
        return {}

    def convert(self, site: Site, specs: Mapping[str, ParamSpec]) -> None:
        OwnNumbers.adopt(site.module, site.parallel)


def is_dropout(module: nn.Module) -> bool:
    return isinstance(module, _DROPOUTS)
