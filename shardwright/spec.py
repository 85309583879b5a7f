"""How one parameter is laid out: the note that the sharder leaves on every parameter it touches.

Initialisation, ZeRO, the gradient norm and checkpoints read this note; none of them needs to know which layer or which
plan produced it.

Vocabulary:
    axis    an axis of the mesh ("tp")
    dim     a dimension of the tensor
    block   an equal part along dim 0, cut off before `dim` is cut: experts over ep, whose features are cut over tp
    piece   a run of indices along `dim`; a rank's shard is the concatenation of its pieces. Plain column sharding has
            one piece per rank, a fused q/k/v weight has three, a padded vocabulary ends in a piece of padding, and
            key/value heads that several ranks share appear in the pieces of each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

_ATTRIBUTE = "_shardwright_spec"
EXPERT_AXES = ("ep", "ep_tp")  # of parameters that differ between data-parallel ranks


class Piece(NamedTuple):
    """`length` indices of the full dim from `start` on, or `length` rows of padding when `start` is `PADDING`."""

    start: int
    length: int

    @property
    def is_padding(self) -> bool:
        return self.start == PADDING


PADDING = -1


class SharedRun(NamedTuple):
    """Indices of the full dim that more than one rank holds, so that their gradients must be summed over the
    holders.
    """

    start: int
    length: int
    holders: tuple[int, ...]  # coordinates along the axis, ascending; the first one owns the run


@dataclass(frozen=True)
class ParamSpec:
    """Layout of one parameter.

    name        full name in the HuggingFace model, the name that checkpoints use
    full_shape  shape of the unsharded, unpadded tensor
    dim         sharded dim, or None when every rank holds the whole tensor
    pieces      for every coordinate along `axis`, the pieces of that rank's shard (empty when `dim` is None)
    axis        mesh axis that `pieces` is indexed by
    partial     axes over which the gradient of the *whole* parameter is a partial sum: it must be all-reduced (sum)
                after backward because the parameter is replicated but is applied to sharded activations
    tied        name of the group of parameters that share one value across pipeline stages, or None
    blocks      how many equal blocks of dim 0 there are, each of which `dim` and `pieces` lay out: coordinate c along
                `axis` has piece c % len(pieces) of block c // len(pieces)
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int | None = None
    pieces: tuple[tuple[Piece, ...], ...] = ()
    axis: str = "tp"
    partial: tuple[str, ...] = ()
    tied: str | None = None
    blocks: int = 1

    def __post_init__(self) -> None:
        assert self.blocks == 1 or self.dim, f"{self.name}: blocks are cut along dim 0, pieces along another one"
        assert (self.dim is None) == (not self.pieces), f"{self.name}: dim and pieces go together"
        if self.dim is not None:
            size = self.full_shape[self.dim]
            for piece in (piece for rank in self.pieces for piece in rank):
                assert piece.is_padding or 0 <= piece.start <= piece.start + piece.length <= size, (
                    f"{self.name}: {piece} outside 0..{size}"
                )

    @property
    def is_sharded(self) -> bool:
        return self.dim is not None

    @property
    def is_of_experts(self) -> bool:
        """Whether data-parallel ranks hold different parts."""
        return self.axis in EXPERT_AXES

    def pieces_at(self, coordinate: int) -> tuple[Piece, ...]:
        return self.pieces[coordinate % len(self.pieces)]

    def block(self, coordinate: int) -> tuple[int, int]:
        """(start, length) along dim 0 of the block that `coordinate` has a part of."""
        length = self.full_shape[0] // self.blocks
        return coordinate // len(self.pieces) * length, length

    def block_of(self, full: torch.Tensor, coordinate: int) -> torch.Tensor:
        """The part of `full` that pieces are indices of."""
        return full if self.blocks == 1 else full.narrow(0, *self.block(coordinate))

    def local_shape(self, coordinate: int) -> tuple[int, ...]:
        """Shape of the shard that the rank at `coordinate` holds, padding included."""
        if self.dim is None:
            return self.full_shape
        shape = list(self.full_shape)
        if self.blocks > 1:
            shape[0] = self.block(coordinate)[1]
        shape[self.dim] = sum(piece.length for piece in self.pieces_at(coordinate))
        return tuple(shape)

    def shard(self, full: torch.Tensor, coordinate: int) -> torch.Tensor:
        """The shard of `full` at `coordinate`, a fresh contiguous tensor; padding is zero."""
        assert tuple(full.shape) == self.full_shape, f"{self.name}: got {tuple(full.shape)}, expected {self.full_shape}"
        if self.dim is None:
            return full.clone(memory_format=torch.contiguous_format)
        local = full.new_zeros(self.local_shape(coordinate))
        full = self.block_of(full, coordinate)
        for piece, offset in self._placed(coordinate):
            local.narrow(self.dim, offset, piece.length).copy_(full.narrow(self.dim, piece.start, piece.length))
        return local

    def unshard(self, locals_: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the shards of all coordinates; the owner's copy wins where ranks share rows."""
        if self.dim is None:
            return locals_[0].clone(memory_format=torch.contiguous_format)
        full = locals_[0].new_empty(self.full_shape)
        for coordinate in reversed(range(self.blocks * len(self.pieces))):
            for piece, offset in self._placed(coordinate):
                self.block_of(full, coordinate).narrow(self.dim, piece.start, piece.length).copy_(
                    locals_[coordinate].narrow(self.dim, offset, piece.length)
                )
        return full

    def _placed(self, coordinate: int) -> list[tuple[Piece, int]]:
        """Real pieces of a rank with their offset in its shard."""
        placed, offset = [], 0
        for piece in self.pieces_at(coordinate):
            if not piece.is_padding and piece.length:
                placed.append((piece, offset))
            offset += piece.length
        return placed

    @cached_property
    def shared_runs(self) -> tuple[SharedRun, ...]:
        """Runs of the full dim held by more than one coordinate, ascending."""
        edges = sorted(
            {edge for rank in self.pieces for p in rank if not p.is_padding for edge in (p.start, p.start + p.length)}
        )
        runs = []
        for start, end in pairwise(edges):
            holders = tuple(
                c
                for c, rank in enumerate(self.pieces)
                if any(not p.is_padding and p.start <= start and end <= p.start + p.length for p in rank)
            )
            if len(holders) > 1:
                runs.append(SharedRun(start, end - start, holders))
        return tuple(runs)

    def local_runs(self, coordinate: int, start: int, length: int) -> list[tuple[int, int, int]]:
        """Where indices [start, start + length) of the full dim lie in the shard at `coordinate`.

        Returns (offset in the run, offset in the shard, length) triples.
        """
        found = []
        for piece, offset in self._placed(coordinate):
            low, high = max(start, piece.start), min(start + length, piece.start + piece.length)
            if low < high:
                found.append((low - start, offset + low - piece.start, high - low))
        return found

    def owned(self, coordinate: int) -> list[tuple[int, int]]:
        """(offset, length) runs of the shard that this coordinate counts in norms: no padding, shared rows only at
        their owner.

        A replicated parameter is owned by coordinate 0 of the axis; the caller handles that case through `is_sharded`.
        """
        place = coordinate % max(len(self.pieces), 1)
        taken = {(run.start, run.length) for run in self.shared_runs if run.holders[0] != place}
        runs: list[tuple[int, int]] = []
        for piece, offset in self._placed(coordinate):
            cuts = [piece.start, piece.start + piece.length]
            for start, length in taken:
                cuts += [edge for edge in (start, start + length) if piece.start < edge < piece.start + piece.length]
            for low, high in pairwise(sorted(set(cuts))):
                if not any(start <= low and high <= start + length for start, length in taken):
                    runs.append((offset + low - piece.start, high - low))
        return runs

    def renamed(self, name: str) -> ParamSpec:
        return replace(self, name=name)


def even_pieces(size: int, ranks: int, start: int = 0, granule: int = 1) -> tuple[tuple[Piece, ...], ...]:
    """`size` indices from `start`, dealt to `ranks` in equal runs of whole granules, the last ranks padded if need be.

    Every rank's shard has ceil(size / granule / ranks) * granule indices, so that kernels see equal shapes.
    """
    assert size % granule == 0
    share = -(-(size // granule) // ranks) * granule
    result = []
    for rank in range(ranks):
        low, high = min(rank * share, size), min((rank + 1) * share, size)
        pieces = [Piece(start + low, high - low)] if high > low else []
        if high - low < share:
            pieces.append(Piece(PADDING, share - (high - low)))
        result.append(tuple(pieces))
    return tuple(result)


def joined_pieces(*parts: tuple[tuple[Piece, ...], ...]) -> tuple[tuple[Piece, ...], ...]:
    """Pieces of a fused parameter: for every rank, its pieces of each part one after the other."""
    return tuple(tuple(piece for pieces in rank_parts for piece in pieces) for rank_parts in zip(*parts, strict=True))


def set_spec(param: torch.Tensor, spec: ParamSpec) -> None:
    setattr(param, _ATTRIBUTE, spec)


def get_spec(param: torch.Tensor) -> ParamSpec | None:
    """The spec that the sharder set, or None for a parameter nothing has touched (replicated)."""
    return getattr(param, _ATTRIBUTE, None)
