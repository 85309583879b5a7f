"""Whether two tensors of files have one value: a model that ties them has room for one."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from .boxes import Box

_NUMBERS = 2**22  # of each tensor in memory at a time


class _Source(Protocol):
    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, box: Box, out: Any) -> None: ...


def are_equal(source: _Source, name: str, other: str, dtype: torch.dtype = torch.float64) -> bool:
    """In `dtype`, read some rows at a time. NaN equals NaN."""
    if name == other:
        return True
    shape = source.shape(name)
    if source.shape(other) != shape:
        return False
    rows = max(1, _NUMBERS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0] if shape else 1, rows):
        size = (min(rows, shape[0] - start), *shape[1:]) if shape else ()
        box = Box((start, *(0 for _ in shape[1:])) if shape else (), size)
        ours, theirs = (torch.empty(size, dtype=dtype, device="cpu") for _ in range(2))
        source.read(name, box, ours)
        source.read(other, box, theirs)
        if not bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
            return False
    return True
