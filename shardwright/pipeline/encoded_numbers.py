"""Numbers between stages, as a tensor."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..utils.pytree import tree_leaves


def numbers_in(value: Any) -> list[bool | int | float]:
    """Those among the leaves of a value."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, bool | int | float)]


def encode(numbers: Sequence[bool | int | float], device: torch.device) -> torch.Tensor:
    """[n, 2] of int64: 0 and the number, 1 and the bits of a float, 2 and a truth value."""
    rows = []
    for number in numbers:
        if isinstance(number, bool):
            rows.append((2, int(number)))
        elif isinstance(number, int):
            rows.append((0, int(number)))
        else:
            rows.append((1, struct.unpack("<q", struct.pack("<d", number))[0]))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def decode(encoded: torch.Tensor) -> list[bool | int | float]:
    read: dict[int, Callable[[int], bool | int | float]] = {
        0: int,
        1: lambda bits: struct.unpack("<d", struct.pack("<q", bits))[0],
        2: bool,
    }
    return [read[kind](value) for kind, value in encoded.tolist()]
