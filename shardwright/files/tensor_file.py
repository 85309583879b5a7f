"""Safetensors files: written front to back without a copy of the whole, read by slices after every number in the header
was checked.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data without
holes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import reprlib
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .boxes import Box
from .disk import OutputFile
from .errors import CheckpointDamaged, UnsafeCheckpoint

_PIECE = 1 << 30  # bytes per system call
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MOST_DIMS = 64  # of a tensor that torch computes with
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class StoredTensor(NamedTuple):
    """One tensor of a file: where its bytes are, from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def dtype_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(
            f"dtype {dtype} has no name in safetensors files; convert the tensor to one of "
            f"{', '.join(map(str, _NAMES))}"
        )
    return _NAMES[dtype]


def dtype_of(name: Any, where: Path | str) -> torch.dtype:
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsafeCheckpoint(f"{where}: dtype {reprlib.repr(name)} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def shape_of(shape: Any, where: Path) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**62 for size in shape
    ):
        raise UnsafeCheckpoint(f"{where}: shape {reprlib.repr(shape)} is not a list of sizes")
    if len(shape) > _MOST_DIMS:
        raise UnsafeCheckpoint(f"{where}: a tensor of {len(shape)} dims; torch computes with at most {_MOST_DIMS}")
    return tuple(shape)


class Pending(NamedTuple):
    """A tensor that is fetched when its turn to be written comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def pending(name: str, tensor: torch.Tensor) -> Pending:
    return Pending(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write_tensors(path: Path, tensors: Sequence[Pending]) -> tuple[int, int]:
    """Write `tensors` in the order given after sorting by element size (which keeps all of them aligned); returns
    (size, crc).

    At most one tensor at a time is copied: a strided view is made contiguous, a tensor on another device is brought to
    the host.
    """
    ordered = sorted(tensors, key=lambda item: -item.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in ordered:
        header[item.name] = {
            "dtype": dtype_name(item.dtype),
            "shape": list(item.shape),
            "data_offsets": [offset, offset + item.nbytes],
        }
        offset += item.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(
            f"{path}: {len(ordered)} tensors need a header of {len(text)} bytes, more than the format "
            "allows; save more files"
        )
    with OutputFile(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for item in ordered:
            if item.nbytes:
                host = item.fetch().detach().contiguous().cpu()
                assert (tuple(host.shape), host.dtype) == (item.shape, item.dtype), item.name
                file.write(host.view(-1).view(torch.uint8).numpy().data)
    return file.size, file.crc


class TensorFile:
    """A safetensors file opened for reading. Tensors are views of the mapped file: what is not touched is not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with path.open("rb") as file:
            self.tensors = _read_header(file, size, path)
            # private: nothing can write through it to the file
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def tensor(self, name: str) -> torch.Tensor:
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointDamaged(self.path, f"has no tensor {name!r}")
        if stored.start == stored.stop:
            return torch.empty(stored.shape, dtype=stored.dtype)
        if stored.start % stored.dtype.itemsize:  # other writers may place tensors at odd offsets
            raw = torch.frombuffer(bytearray(self._map[stored.start : stored.stop]), dtype=torch.uint8)
            return raw.view(stored.dtype).view(stored.shape)
        count = math.prod(stored.shape)
        return torch.frombuffer(self._map, dtype=stored.dtype, count=count, offset=stored.start).view(stored.shape)

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Copy `box` of a tensor into `out`, converting dtypes; straight from the file where both are contiguous and
        alike.
        """
        stored = self.tensors.get(name)
        run = None if stored is None else _run(box, stored.shape)
        if (
            stored is None
            or run is None
            or not out.is_contiguous()
            or out.dtype != stored.dtype
            or out.device.type != "cpu"
            or not run[1]
        ):
            tensor = self.tensor(name)
            out.copy_(box.view(tensor, (0,) * tensor.ndim))
            return
        view, offset = out.view(-1).view(torch.uint8).numpy().data, stored.start + run[0] * stored.dtype.itemsize
        while view:
            count = os.preadv(self._descriptor, [view[:_PIECE]], offset)
            if not count:
                raise CheckpointDamaged(self.path, "was cut short while it was read")
            view, offset = view[count:], offset + count


def _run(box: Box, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """(first element, number of elements) of a box that is contiguous in a row-major tensor of `shape`, else None."""
    sizes = list(box.size)
    whole = len(shape)  # dims from here on are taken whole
    while whole and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    if any(size != 1 for size in sizes[: max(whole - 1, 0)]):
        return None
    first = 0
    for start, size in zip(box.start, shape, strict=True):
        first = first * size + start
    return first, box.numel


def _read_header(file: Any, size: int, path: Path) -> dict[str, StoredTensor]:
    if size < 8:
        raise CheckpointDamaged(path, f"is cut short: {size} bytes")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(_MAX_HEADER, size - 8):
        raise UnsafeCheckpoint(f"{path}: header of {length} bytes in a file of {size} bytes")
    try:
        header = json.loads(file.read(length))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise UnsafeCheckpoint(f"{path}: the header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise UnsafeCheckpoint(f"{path}: the header is not a table")
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise UnsafeCheckpoint(f"{path}: {name!r} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = dtype_of(entry["dtype"], path), shape_of(entry["shape"], path), entry["data_offsets"]
        if not isinstance(offsets, list) or len(offsets) != 2 or not all(isinstance(offset, int) for offset in offsets):
            raise UnsafeCheckpoint(f"{path}: {name!r} has data_offsets {offsets!r}")
        start, stop = offsets
        if not 0 <= start <= stop or 8 + length + stop > size:
            raise UnsafeCheckpoint(
                f"{path}: {name!r} lies at {start}..{stop}, but the file has {size - 8 - length} bytes of data"
            )
        if stop - start != math.prod(shape) * dtype.itemsize:
            raise UnsafeCheckpoint(
                f"{path}: {name!r} of shape {shape} and dtype {entry['dtype']} cannot have {stop - start} bytes"
            )
        tensors[name] = StoredTensor(dtype, shape, 8 + length + start, 8 + length + stop)
    return tensors
