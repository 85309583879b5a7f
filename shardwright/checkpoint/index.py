"""What lies where in a resumable checkpoint, and reading any box of it.

Every rank writes safetensors files of chunks and one JSON file that says which box of which full tensor each chunk is:

    {"weights/model.norm.weight": {"dtype": "F32", "shape": [48],
                                   "chunks": [{"file": "rank-00000.safetensors", "key": "0", "start": [0], "size":
                                   [48]}]}}

    weights/<parameter>       the values that the optimizer steps on (fp32 masters where there are any), else the
                              model's own
    state/<key>/<parameter>   per-element optimizer state, in the coordinates of the parameter
    extra/<key>/<parameter>   optimizer state that is not per element (step counts), whole
    rng/<kind>/<rank>         states of the random generators of one rank

The union over ranks is the checkpoint. All of it is in full, unpadded coordinates: no trace is left of the layout it
was saved at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..files.boxes import Box, whole
from ..files.errors import CheckpointDamaged, UnsafeCheckpoint
from ..files.paths import inside
from ..files.tensor_file import TensorFile, dtype_name, dtype_of, shape_of

_FEW = 64  # parts that are compared by pairs


class Chunk(NamedTuple):
    """A box of a full tensor, to be written; `data` has the box's shape."""

    name: str
    full_shape: tuple[int, ...]
    box: Box
    data: torch.Tensor


class _Place(NamedTuple):
    file: str
    key: str
    box: Box


class Entry(NamedTuple):
    """One full tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: list[_Place]


def describe(files: Mapping[str, Sequence[Chunk]]) -> dict[str, Any]:
    """The index of one rank's files, whose tensors are named by the chunks' numbers."""
    tensors: dict[str, Any] = {}
    for file, chunks in files.items():
        for number, chunk in enumerate(chunks):
            entry = tensors.setdefault(
                chunk.name, {"dtype": dtype_name(chunk.data.dtype), "shape": list(chunk.full_shape), "chunks": []}
            )
            place = {"file": file, "key": str(number), "start": list(chunk.box.start), "size": list(chunk.box.size)}
            entry["chunks"].append(place)
    return tensors


class TensorIndex:
    """The tensors of a checkpoint directory; files are opened when something in them is read."""

    def __init__(self, directory: Path, tables: Iterable[Any]) -> None:
        """`tables`: the index of every rank."""
        self.directory = directory
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, TensorFile] = {}
        known: dict[str, set[Box]] = {}
        for table in tables:
            if not isinstance(table, dict):
                raise UnsafeCheckpoint(f"{directory}: the index of a rank is not a table")
            for name, entry in table.items():
                self._add(name, entry, known.setdefault(name, set()))
        for name, entry in self.entries.items():
            if sum(place.box.numel for place in entry.places) != whole(entry.shape).numel:
                raise CheckpointDamaged(directory, f"does not hold the whole of {name}")

    def _add(self, name: str, entry: Any, known: set[Box]) -> None:
        """`known`: the boxes of this tensor that were added before."""
        try:
            dtype, shape = dtype_of(entry["dtype"], self.directory), shape_of(entry["shape"], self.directory)
            found = self.entries.setdefault(name, Entry(dtype, shape, []))
            if (found.dtype, found.shape) != (dtype, shape):
                raise UnsafeCheckpoint(f"{self.directory}: {name} has two shapes or dtypes")
            for chunk in entry["chunks"]:
                box = Box(shape_of(chunk["start"], self.directory), shape_of(chunk["size"], self.directory))
                if (
                    len(box.start) != len(shape)
                    or len(box.size) != len(shape)
                    or any(start + size > limit for start, size, limit in zip(box.start, box.size, shape, strict=True))
                ):
                    raise UnsafeCheckpoint(f"{self.directory}: a chunk of {name} lies outside its shape {shape}")
                # buffers are saved by every stage that holds them
                if box not in known:
                    known.add(box)
                    found.places.append(_Place(chunk["file"], str(chunk["key"]), box))
        except (KeyError, TypeError) as error:
            raise UnsafeCheckpoint(f"{self.directory}: the index does not describe {name!r} ({error!r})") from None

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        """Copy `box` of the full tensor `name` into `out`, which has the box's shape; dtypes are converted."""
        entry = self.entries[name]
        every = [(place, box.intersect(place.box)) for place in entry.places] if box.numel else []
        found = [(place, common) for place, common in every if common is not None]
        if _overlap([common for _, common in found], box):
            raise UnsafeCheckpoint(f"{self.directory}: chunks of {name} overlap")
        for place, common in found:
            file = self._stored(name, place)
            start = tuple(a - b for a, b in zip(common.start, place.box.start, strict=True))
            file.read(place.key, Box(start, common.size), common.view(out, box.start))
        if sum(common.numel for _, common in found) != box.numel:
            raise CheckpointDamaged(self.directory, f"does not hold all of {name}")

    def _stored(self, name: str, place: _Place) -> TensorFile:
        """The file that holds this chunk, of the shape and dtype that the index says."""
        file, dtype = self._open(place.file), self.entries[name].dtype
        stored = file.tensors.get(place.key)
        if stored is None or (stored.shape, stored.dtype) != (place.box.size, dtype):
            held = "missing" if stored is None else f"{stored.shape} {stored.dtype}"
            raise UnsafeCheckpoint(
                f"{file.path}: chunk {place.key} of {name} is {held}, the index says {place.box.size} {dtype}"
            )
        return file

    def read_whole(self, name: str) -> torch.Tensor:
        """UnsafeCheckpoint before anything is allocated, where the files do not hold as much as the index says."""
        entry = self.entries[name]
        for place in entry.places:
            self._stored(name, place)
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, whole(entry.shape), out)
        return out

    def _open(self, file: str) -> TensorFile:
        if file not in self._files:
            self._files[file] = TensorFile(inside(self.directory, file))
        return self._files[file]


def _overlap(parts: Sequence[Box], box: Box) -> bool:
    """Whether any two of these parts of `box` have an element in common. Many parts are not compared by pairs, which
    would let an index of a few megabytes keep its reader busy for hours.
    """
    if len(parts) <= _FEW:
        return any(one.intersect(other) for number, one in enumerate(parts) for other in parts[:number])
    if sum(part.numel for part in parts) > box.numel:
        return True
    taken = torch.zeros(box.size, dtype=torch.bool)
    for part in parts:
        taken_here = part.view(taken, box.start)
        if taken_here.any():
            return True
        taken_here.fill_(True)
    return False
