"""Rectangles of tensors: the coordinates in which a checkpoint describes what it holds, whatever the layout.

A rank holds a flat, row-major range of its local tensor, and the local tensor holds pieces of the full one along one
dim. A flat range of an n-dim tensor is at most 2n - 1 rectangles; each is cut where pieces meet, and what remains are
boxes of the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..spec import ParamSpec


class Box(NamedTuple):
    """Indices [start, start + size) of every dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        low = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return Box(low, tuple(b - a for a, b in zip(low, high, strict=True)))

    def view(self, tensor: torch.Tensor, origin: Sequence[int]) -> torch.Tensor:
        """This box of `tensor`, whose first element has the coordinates `origin`."""
        for dim, (start, size, base) in enumerate(zip(self.start, self.size, origin, strict=True)):
            tensor = tensor.narrow(dim, start - base, size)
        return tensor


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a row-major tensor as boxes, in order; each of them is contiguous in memory."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    row, first_whole = start // inner, -(-start // inner)
    last_whole = max(stop // inner, row)
    if row < first_whole:  # the range begins within a row
        end = min(stop, first_whole * inner)
        for box in flat_boxes(shape[1:], start - row * inner, end - row * inner):
            yield Box((row, *box.start), (1, *box.size))
    if first_whole < last_whole:
        yield Box((first_whole,) + (0,) * (len(shape) - 1), (last_whole - first_whole, *shape[1:]))
    if last_whole >= first_whole:
        for box in flat_boxes(shape[1:], 0, stop - last_whole * inner):
            yield Box((last_whole, *box.start), (1, *box.size))


@dataclass(frozen=True)
class Part:
    """A box of a full tensor, and where its elements lie in a rank's flat data.

    box     in the full tensor
    offset  of a contiguous run in the flat data
    shape   of that run
    dim, low  the box is the run narrowed along `dim` from `low` on (dim None: the whole run)
    """

    box: Box
    offset: int
    shape: tuple[int, ...]
    dim: int | None = None
    low: int = 0

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        run = flat.narrow(0, self.offset, math.prod(self.shape)).view(self.shape)
        return run if self.dim is None else run.narrow(self.dim, self.low, self.box.size[self.dim])


def parts_of(
    spec: ParamSpec, coordinate: int, local_shape: Sequence[int], start: int, stop: int, owned: bool
) -> list[Part]:
    """Parts of the full tensor in elements [start, stop) of the local tensor at `coordinate`.

    owned   only what this coordinate owns (rows that several ranks hold belong to the first of them), for writing
    """
    parts, offset = [], 0
    for box in flat_boxes(local_shape, start, stop):
        if spec.dim is None:
            parts.append(Part(box, offset, box.size))
        else:
            dim, low = spec.dim, box.start[spec.dim]
            for local, full, length in _runs(spec, coordinate, owned):
                begin, end = max(local, low), min(local + length, low + box.size[dim])
                if begin < end:
                    begins = (*box.start[:dim], full + begin - local, *box.start[dim + 1 :])
                    if spec.blocks > 1:
                        begins = (begins[0] + spec.block(coordinate)[0], *begins[1:])
                    sizes = (*box.size[:dim], end - begin, *box.size[dim + 1 :])
                    parts.append(Part(Box(begins, sizes), offset, box.size, dim, begin - low))
        offset += box.numel
    return parts


def _runs(spec: ParamSpec, coordinate: int, owned: bool) -> list[tuple[int, int, int]]:
    """(offset in the shard, start in the full dim, length) of every run of real rows."""
    placed, offset = [], 0
    for piece in spec.pieces_at(coordinate):
        if not piece.is_padding and piece.length:
            placed.append((offset, piece.start, piece.length))
        offset += piece.length
    if not owned:
        return placed
    runs = []
    for low, length in spec.owned(coordinate):
        for local, full, size in placed:
            begin, end = max(low, local), min(low + length, local + size)
            if begin < end:
                runs.append((begin, full + begin - local, end - begin))
    return runs
