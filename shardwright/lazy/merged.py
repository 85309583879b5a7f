"""Slices of a parameter that transformers merges from many stored tensors, read without the rest of them.

Experts are stored one by one and fused in memory: E tensors [I, H] for the gate and E for the up projection become one
[E, 2 I, H]. A rank that holds some columns of the result needs the same columns of every source, so those are read
straight into their place:

    merged        target[e, ...] = source_e[...]                        dim d of the target is dim d - 1 of the sources
    concatenated  target[..., o_p : o_p + n_p, ...] = part_p            o_p: where the part of pattern p begins

The host holds this rank's shard and one slice of one source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..spec import ParamSpec, Piece


class _Part(NamedTuple):
    """What one pattern contributes: its stored tensors, and the size and start of their share along the dim of
    concatenation.
    """

    keys: Sequence[str]
    start: int
    size: int


class MergedSources:
    """How one parameter is put together; None from `of` where transformers does more than merge and concatenate.

    view    key -> safetensors' slice of a stored tensor
    """

    def __init__(
        self, groups: Sequence[Sequence[str]], merges: bool, concatenated: int | None, view: Callable[[str], Any]
    ) -> None:
        self._merges = merges
        self._dim = concatenated
        self._view = view
        shape = [*([len(groups[0])] if merges else []), *view(groups[0][0]).get_shape()]
        self._parts = []
        start = 0
        for keys in groups:
            own = [*([len(keys)] if merges else []), *view(keys[0]).get_shape()]
            size = own[concatenated] if concatenated is not None else 0
            self._parts.append(_Part(keys, start, size))
            start += size
        if concatenated is not None:
            shape[concatenated] = start
        self.shape = tuple(shape)

    @classmethod
    def of(cls, converter: Any, keys: Sequence[tuple[str, str]], view: Callable[[str], Any]) -> MergedSources | None:
        operations = {type(operation).__name__: operation for operation in converter.operations}
        merge, concatenate = operations.pop("MergeModulelist", None), operations.pop("Concatenate", None)
        in_order = [type(operation).__name__ for operation in converter.operations] != [
            "Concatenate",
            "MergeModulelist",
        ]
        if operations or not in_order or len(converter.target_patterns) != 1 or (merge is not None and merge.dim != 0):
            return None
        groups = [[key for key, found in keys if found == pattern] for pattern in converter.source_patterns]
        groups = [group for group in groups if group]
        if (concatenate is None) != (len(groups) == 1) or (merge is None and any(len(group) > 1 for group in groups)):
            return None
        return cls(
            groups,
            merge is not None,
            None if concatenate is None else concatenate.dim % (2 + (merge is not None)),
            view,
        )

    def read(self, spec: ParamSpec, coordinate: int) -> Tensor:
        """The shard at `coordinate`."""
        dim = 0 if spec.dim is None else spec.dim
        pieces = (Piece(0, self.shape[0]),) if spec.dim is None else spec.pieces[coordinate]
        shape = list(self.shape)
        shape[dim] = sum(piece.length for piece in pieces)
        local = torch.empty(shape, dtype=self._view(self._parts[0].keys[0])[0:0].dtype)
        position = 0
        for piece in pieces:
            target = local.narrow(dim, position, piece.length)
            position += piece.length
            if piece.is_padding:
                target.zero_()
                continue
            for part in self._parts:
                self._fill(target, piece, part, dim)
        return local

    def _fill(self, target: Tensor, piece: Piece, part: _Part, dim: int) -> None:
        """`target` is the piece of this rank; fill in what of it comes from `part`."""
        first, last = piece.start, piece.start + piece.length
        if self._dim == dim:
            first, last = max(first, part.start), min(last, part.start + part.size)
            if first >= last:
                return
            target = target.narrow(dim, first - piece.start, last - first)
            first, last = first - part.start, last - part.start
        elif self._dim is not None:
            target = target.narrow(self._dim, part.start, part.size)
        if not self._merges:
            target.copy_(self._view(part.keys[0])[(slice(None),) * dim + (slice(first, last),)])
        elif dim == 0:
            for index in range(first, last):
                target[index - first].copy_(self._view(part.keys[index])[:])
        else:
            for index, key in enumerate(part.keys):
                target[index].copy_(self._view(key)[(slice(None),) * (dim - 1) + (slice(first, last),)])
