"""Boxes of a tensor that transformers merges from many stored ones, read without the rest of them.

Experts are stored one by one and fused in memory: E tensors [I, H] for the gate and E for the up projection become one
[E, 2 I, H]. A rank that holds some columns of the result needs the same columns of every source, so those are read
straight into their place:

    merged        target[e, ...] = source_e[...]                        dim d of the target is dim d - 1 of the sources
    concatenated  target[..., o_p : o_p + n_p, ...] = part_p            o_p: where the part of pattern p begins
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .boxes import Box
from .hf_names import Stored


class Files(Protocol):
    def shape(self, key: str) -> tuple[int, ...]: ...

    def dtype(self, key: str) -> torch.dtype: ...

    def read(self, key: str, box: Box, out: torch.Tensor) -> None: ...


class _Part(NamedTuple):
    """What one pattern contributes: its stored tensors, and the size and start of their share along the dim of
    concatenation.
    """

    keys: Sequence[str]
    start: int
    size: int


class MergedTensor:
    """How one tensor is put together; None from `of` where transformers does more than merge and concatenate.

    merges          the tensors of a group are stacked along a new dim 0
    concatenated    dim of the result along which groups follow each other; None with one group
    """

    def __init__(self, files: Files, groups: Sequence[Sequence[str]], merges: bool, concatenated: int | None) -> None:
        self._files = files
        self._merges = merges
        shape = _shape(files, groups[0], merges)
        self._dim = None if concatenated is None else concatenated % len(shape)
        self._parts: list[_Part] = []
        start = 0
        for keys in groups:
            size = 0 if self._dim is None else _shape(files, keys, merges)[self._dim]
            self._parts.append(_Part(keys, start, size))
            start += size
        if self._dim is not None:
            shape[self._dim] = start
        self.shape = tuple(shape)
        self.dtype = files.dtype(groups[0][0])

    @classmethod
    def of(cls, files: Files, stored: Stored) -> MergedTensor | None:
        converter: Any = stored.converter
        kinds = [type(operation).__name__ for operation in converter.operations]
        operations = dict(zip(kinds, converter.operations, strict=True))
        merge, concatenate = operations.get("MergeModulelist"), operations.get("Concatenate")
        if kinds not in (["MergeModulelist"], ["Concatenate"], ["MergeModulelist", "Concatenate"]):
            return None
        if len(converter.target_patterns) != 1 or (merge is not None and merge.dim != 0):
            return None
        groups = [[key for key, found in stored.keys if found == pattern] for pattern in converter.source_patterns]
        groups = [group for group in groups if group]
        if (concatenate is None) != (len(groups) == 1) or (merge is None and any(len(group) > 1 for group in groups)):
            return None
        dim = None if concatenate is None else concatenate.dim
        return cls(files, groups, merge is not None, dim) if _agree(files, groups, merge is not None, dim) else None

    def read(self, box: Box, out: torch.Tensor) -> None:
        for part in self._parts:
            start, size, target = list(box.start), list(box.size), out
            if (dim := self._dim) is not None:
                first, last = max(start[dim], part.start), min(start[dim] + size[dim], part.start + part.size)
                if first >= last:
                    continue
                target = out.narrow(dim, first - start[dim], last - first)
                start[dim], size[dim] = first - part.start, last - first
            if not self._merges:
                self._files.read(part.keys[0], Box(tuple(start), tuple(size)), target)
                continue
            source = Box(tuple(start[1:]), tuple(size[1:]))
            for index, key in enumerate(part.keys[start[0] : start[0] + size[0]]):
                self._files.read(key, source, target[index])


def _shape(files: Files, keys: Sequence[str], merges: bool) -> list[int]:
    """Of what the tensors of one pattern become."""
    return [*([len(keys)] if merges else []), *files.shape(keys[0])]


def _agree(files: Files, groups: Sequence[Sequence[str]], merges: bool, concatenated: int | None) -> bool:
    """Whether the stored tensors fit each other. Where one is missing or odd, transformers' converter says what."""
    shapes = [_shape(files, keys, merges) for keys in groups]
    if concatenated is not None:
        for shape in shapes:
            shape[concatenated] = 0
    alike = all(files.shape(key) == files.shape(keys[0]) for keys in groups for key in keys)
    dtypes = {files.dtype(key) for keys in groups for key in keys}
    return alike and len(dtypes) == 1 and all(shape == shapes[0] for shape in shapes)
