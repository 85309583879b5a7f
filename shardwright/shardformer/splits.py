"""How the indices of a dimension are dealt to the ranks of a group.

A split is a value that turns a size into pieces (see `shardwright.spec`). Styles say *which* dimension of a parameter
is sharded, splits say *how*: evenly, head by head, part by part of a fused projection, or with the padding of a
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch.nn as nn

from ..spec import PADDING, Piece, joined_pieces
from .heads import HeadGeometry

Pieces = tuple[tuple[Piece, ...], ...]


class Split(Protocol):
    """Deals `size` indices of a parameter of `module` to `ranks`; raises ValueError with the reason when it cannot."""

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces: ...


def deal(size: int, ranks: int, start: int = 0) -> Pieces:
    """`size` indices from `start` in `ranks` contiguous runs whose lengths differ by one at most: no rank carries
    padding.

    Uneven shards need no equal shapes, because column and row shards never travel: only their sums and inputs do.
    """
    if size < ranks:
        raise ValueError(
            f"{size} features cannot be dealt to {ranks} ranks; use at most {size} ranks or leave the "
            "layer out of the plan"
        )
    share, extra = divmod(size, ranks)
    result, low = [], start
    for rank in range(ranks):
        length = share + (rank < extra)
        result.append((Piece(low, length),))
        low += length
    return tuple(result)


@dataclass(frozen=True)
class Even:
    """One contiguous run per rank, of whole granules of `granule` features (interleaved gate and up: two)."""

    granule: int = 1

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        if size % self.granule:
            raise ValueError(f"{size} features are not whole granules of {self.granule}")
        dealt = deal(size // self.granule, ranks)
        return tuple(
            tuple(Piece(start * self.granule, length * self.granule) for start, length in rank) for rank in dealt
        )


EVEN = Even()


@dataclass(frozen=True)
class Packed:
    """Fused parts one after the other (gate and up; GPT-2's q, k, v); every part is dealt for itself.

    parts   number of equal parts, or the size of each
    """

    parts: int | tuple[int, ...] = 2

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        if isinstance(self.parts, int):
            if size % self.parts:
                raise ValueError(f"{size} features are not {self.parts} equal parts; give the size of each part")
            sizes = (size // self.parts,) * self.parts
        else:
            sizes = self.parts
            if sum(sizes) != size:
                raise ValueError(f"parts {sizes} add up to {sum(sizes)}, but there are {size} features")
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return joined_pieces(*(deal(part, ranks, start) for part, start in zip(sizes, starts, strict=True)))


@dataclass(frozen=True)
class PackedHeads:
    """Equal parts one after the other, each of whole heads, of which every rank has as many of each part.

    parts    how many of them
    groups   how many parts all heads make: 4 for 12 heads and parts of 3
    kind     which heads these are
    """

    parts: int
    groups: int
    kind: Literal["q", "kv"] = "q"

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        geometry = HeadGeometry.of(parent)
        heads = geometry.num_heads if self.kind == "q" else geometry.num_kv_heads
        if heads % (self.groups * ranks) or size % (self.parts * heads // self.groups):
            raise ValueError(
                f"{heads} heads in {self.groups} parts of equally many cannot be dealt to {ranks} ranks part by part; "
                f"use a tp_size that divides {heads // self.groups}"
            )
        return Packed(self.parts).pieces(size, ranks, parent)


@dataclass(frozen=True)
class Heads:
    """Whole attention heads, padded with zero heads or shared between ranks where the numbers ask for it.

    kind        "q"     query heads (and the rows of the output projection that reads them)
                "kv"    key or value heads
                "qk"            [all q | all k]
                "packed"        [all q | all k | all v]
                "interleaved"   for every key/value head: its q heads, k, v
    geometry    head counts; None reads them from the attention module that the layer belongs to
    beside      where that module is, seen from the module above the layer's parent, for a layer outside of it or one
                deeper; "" is the module above itself

    Features per head follow from the size: key heads and value heads may differ, a gate may be fused to every head.
    """

    kind: Literal["q", "kv", "qk", "packed", "interleaved"]
    geometry: HeadGeometry | None = None
    beside: str | None = None

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        geometry = self.geometry or HeadGeometry.of(parent)
        count = geometry.rows(self.kind)
        dim, rest = divmod(size, count)
        if rest:
            raise ValueError(
                f"{size} features are not {count} heads ({geometry}, {self.kind}); give the plan the right HeadGeometry"
            )
        return tuple(
            _merged(
                [
                    Piece(start if start == PADDING else start * dim, length * dim)
                    for start, length in geometry.local(self.kind, rank, ranks)
                ]
            )
            for rank in range(ranks)
        )


@dataclass(frozen=True)
class Vocabulary:
    """Rows of a vocabulary: every rank gets the same number, a multiple of `multiple`; the last rows may be padding."""

    multiple: int = 1

    def pieces(self, size: int, ranks: int, parent: nn.Module) -> Pieces:
        share = -(-size // (self.multiple * ranks)) * self.multiple
        result = []
        for rank in range(ranks):
            low, high = min(rank * share, size), min((rank + 1) * share, size)
            real = (Piece(low, high - low),) if high > low else ()
            padding = (Piece(PADDING, share - (high - low)),) if high - low < share else ()
            result.append(real + padding)
        return tuple(result)


def _merged(pieces: list[Piece]) -> tuple[Piece, ...]:
    """The same indices with neighbouring runs joined."""
    result: list[Piece] = []
    for piece in pieces:
        if not piece.length:
            continue
        last = result[-1] if result else Piece(0, 0)
        follows = (
            last.is_padding if piece.is_padding else not last.is_padding and last.start + last.length == piece.start
        )
        if last.length and follows:
            result[-1] = Piece(last.start, last.length + piece.length)
        else:
            result.append(piece)
    return tuple(result)
