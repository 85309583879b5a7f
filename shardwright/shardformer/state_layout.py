"""State-space mixers (Mamba and its kin): what their parts are made of, and which of it each rank computes.

A mixer runs one recurrence per channel, and channels meet in its output projection only. What differs is how the
channels are counted, and what several of them share:

    mamba           I channels, each for itself. dt, B and C are projected from all of them (`x_proj`)
    mamba2          H heads of I/H channels with one decay each; G groups of H/G heads share B and C, which come out of
                    the fused input projection. Several ranks hold the same group where there are fewer groups than
                    ranks, as with key/value heads
    zamba           H heads, each a mamba of its own with weights [H, ...]

Sizes are those of the whole mixer, also when parts of it are sharded already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn as nn

from ..models.config import first_int
from ..spec import Piece, get_spec, joined_pieces
from .adapters import has_adapters
from .layer.linear import is_conv1d, is_linear
from .splits import Pieces, deal

_GROUPS = ("n_groups", "ngroups", "num_groups")


class Share(NamedTuple):
    """What one rank computes: runs of heads and of groups."""

    heads: Piece
    groups: Piece


@dataclass(frozen=True)
class StateLayout:
    """Sizes of a whole mixer.

    kind        "mamba", "mamba2" or "zamba"
    heads       H, recurrences that are dealt as one: channels (mamba), or heads of several
    groups      G, of as many heads each, which share B and C; as many as heads where nothing is shared
    features    I, channels of all heads
    state       G x N, features of B in the input projection; 0 where it makes no B
    """

    kind: str
    heads: int
    groups: int
    features: int
    state: int = 0

    @classmethod
    def of(cls, mixer: nn.Module) -> StateLayout | None:
        """None for what is no such mixer, or one whose sizes do not go together as they must."""
        known = vars(mixer).get("state_layout")
        if isinstance(known, StateLayout):
            return known
        sizes = _Sizes.of(mixer)
        if sizes is None or mixer._parameters.get("A_log") is None:
            return None
        decays = whole_shape(mixer, "A_log")
        find = _KINDS.get(len(decays))
        layout = None if find is None else find(mixer, decays, sizes.returned, sizes.convolved - sizes.returned)
        return layout if layout is not None and sizes == layout.sizes() else None

    def sizes(self) -> _Sizes:
        """Of the projections and the convolution of such a mixer."""
        projected = 2 * self.features + 2 * self.state + (self.heads if self.kind == "mamba2" else 0)
        return _Sizes(projected, self.features + 2 * self.state, self.features)

    def shares(self, ranks: int) -> list[Share]:
        """ValueError where a rank would be left without a head, or groups would have to be cut unevenly."""
        per_group = self.heads // self.groups
        if self.groups >= ranks:
            dealt = [run for (run,) in deal(self.groups, ranks)]
            return [Share(Piece(run.start * per_group, run.length * per_group), run) for run in dealt]
        if ranks % self.groups:
            raise ValueError(
                f"{self.groups} groups of B and C cannot be shared by {ranks} ranks; use a number of ranks that "
                f"{self.groups} divides, or at most {self.groups}"
            )
        holders = ranks // self.groups
        if per_group < holders:
            raise ValueError(f"{self.heads} heads cannot be dealt to {ranks} ranks; use at most {self.heads} ranks")
        return [
            Share(run, Piece(group, 1))
            for group in range(self.groups)
            for (run,) in deal(per_group, holders, group * per_group)
        ]

    def pieces(self, segments: tuple[str, ...], ranks: int) -> Pieces:
        """Of a dim that is made of these segments: "heads" [H], "features" [I], "pairs" [2I], "states" [G x N]."""
        shares = self.shares(ranks)
        parts: list[Pieces] = []
        for segment in segments:
            count, of = (self.groups, "groups") if segment == "states" else (self.heads, "heads")
            width = self.width(segment) // count
            start = sum(self.width(other) for other in segments[: len(parts)])
            runs = [getattr(share, of) for share in shares]
            parts.append(tuple((Piece(start + run.start * width, run.length * width),) for run in runs))
        return joined_pieces(*parts)

    def width(self, segment: str) -> int:
        return {
            "heads": self.heads,
            "features": self.features,
            "pairs": 2 * self.features,
            "states": self.state,
        }[segment]

    def local(self, rank: int, ranks: int) -> StateLayout:
        """What is left of the mixer on one rank."""
        share = self.shares(ranks)[rank]
        return StateLayout(
            self.kind,
            share.heads.length,
            share.groups.length,
            self.features // self.heads * share.heads.length,
            self.state // self.groups * share.groups.length,
        )


@dataclass(frozen=True)
class StateSplit:
    """A dim of a mixer's parameter, made of `segments` (see `StateLayout.pieces`), each of which is dealt by heads."""

    segments: tuple[str, ...]

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        layout = StateLayout.of(parent)
        if layout is None:
            raise ValueError(f"{type(parent).__name__} is no state-space mixer that is known here; leave the rule out")
        width = sum(map(layout.width, self.segments))
        if width != size:
            raise ValueError(f"{size} features are not {' + '.join(self.segments)} of {layout}, which are {width}")
        return layout.pieces(self.segments, ranks)


class _Sizes(NamedTuple):
    """Features out of the input projection, channels of the convolution, features into the output projection."""

    projected: int
    convolved: int
    returned: int

    @classmethod
    def of(cls, mixer: nn.Module) -> _Sizes | None:
        projection, convolution, output = (
            without_adapters(getattr(mixer, name, None)) for name in ("in_proj", "conv1d", "out_proj")
        )
        linears = [linear for linear in (projection, output) if linear is not None and is_linear(linear)]
        if len(linears) < 2 or any(map(is_conv1d, linears)) or not isinstance(convolution, nn.Conv1d):
            return None
        channels, in_group = whole_shape(convolution, "weight")[:2]
        if in_group != 1:
            return None
        return cls(whole_shape(linears[0], "weight")[0], channels, whole_shape(linears[1], "weight")[1])


def _mamba(mixer: nn.Module, decays: tuple[int, ...], features: int, rest: int) -> StateLayout | None:
    x, dt = (without_adapters(getattr(mixer, name, None)) for name in ("x_proj", "dt_proj"))
    if decays[0] != features or rest or x is None or dt is None or not (is_linear(x) and is_linear(dt)):
        return None
    return StateLayout("mamba", features, features, features)


def _mamba2(mixer: nn.Module, decays: tuple[int, ...], features: int, rest: int) -> StateLayout | None:
    groups = first_int(mixer, _GROUPS) or 1
    if features % decays[0] or decays[0] % groups or rest <= 0 or rest % (2 * groups):
        return None
    return StateLayout("mamba2", decays[0], groups, features, rest // 2)


def _zamba(mixer: nn.Module, decays: tuple[int, ...], features: int, rest: int) -> StateLayout | None:
    if decays[0] * decays[1] != features or rest or "x_proj_weight" not in mixer._parameters:
        return None
    return StateLayout("zamba", decays[0], decays[0], features)


# By the dims of A_log: [H], [I, N], [H, I/H, N].
_KINDS = {1: _mamba2, 2: _mamba, 3: _zamba}


def whole_shape(module: nn.Module, parameter: str) -> tuple[int, ...]:
    """Of a parameter, also when this rank has a part of it by now."""
    param = module.get_parameter(parameter)
    spec = get_spec(param)
    return tuple(param.shape) if spec is None else spec.full_shape


def without_adapters(module: Any) -> nn.Module | None:
    while isinstance(module, nn.Module) and has_adapters(module):
        module = module.base_layer
    return module if isinstance(module, nn.Module) else None
