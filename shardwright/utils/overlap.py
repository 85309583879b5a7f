"""Whether tensors have elements in common: parameters that do are one weight to torch, and several to whoever moves
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class _Extent(NamedTuple):
    """The addresses that a tensor reaches, with gaps where it is not dense."""

    device: str
    start: int
    end: int
    name: str
    tensor: Tensor


def overlapping(tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """The names of every two that share elements; the columns of one matrix share none. Reads no values."""
    found: list[tuple[str, str]] = []
    near: list[_Extent] = []  # that reach beyond where the last one starts
    for extent in sorted(
        (_extent(name, tensor) for name, tensor in tensors if _has_addresses(tensor)), key=lambda extent: extent[:3]
    ):
        near = [other for other in near if other.device == extent.device and other.end > extent.start]
        found += [(other.name, extent.name) for other in near if _share(other, extent)]
        near.append(extent)
    return found


def _has_addresses(tensor: Tensor) -> bool:
    # which wraps others, as DTensors do
    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return False
    return tensor.data_ptr() != 0


def _extent(name: str, tensor: Tensor) -> _Extent:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return _Extent(str(tensor.device), start, start + (last + 1) * tensor.itemsize, name, tensor)


def _share(first: _Extent, second: _Extent) -> bool:
    """Of two whose extents overlap, the first one starting before the second or with it."""
    if first.start == second.start or first.tensor.is_contiguous():
        return True
    taken = torch.zeros(max(first.end, second.end) - first.start, dtype=torch.bool)
    _bytes(taken, first, first.start).fill_(True)
    return bool(_bytes(taken, second, first.start).any())


def _bytes(of: Tensor, extent: _Extent, start: int) -> Tensor:
    """The elements of `of` that stand for the bytes of a tensor; it begins at address `start`."""
    tensor, size = extent.tensor, extent.tensor.itemsize
    return of.as_strided(
        (*tensor.shape, size), (*(stride * size for stride in tensor.stride()), 1), extent.start - start
    )
