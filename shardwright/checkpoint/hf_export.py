"""Weights as a HuggingFace directory or file, from a model of any layout, with no tensor gathered over the network.

A tensor that one rank holds whole goes straight from it into that rank's files. Tensors cut over ranks pass through the
disk: every rank writes its boxes to a staging file, and whoever writes the tensor reads them from there (mostly from
the page cache). Units that transformers converts together (a layer) are written by one rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files.boxes import Part, parts_of
from ..files.disk import make_directory, remove_tree, rename, sync_directory, write_file
from ..files.hf_names import Exporter
from ..files.tensor_file import Pending, pending, write_tensors
from ..interface.shards import ParamShard
from .agreement import Agreement, attempt
from .background import Background, snapshot
from .directory import new_path
from .held import held_tensors
from .index import Chunk, TensorIndex, describe
from .optimizer_parts import parts_of_optimizer
from .position import Position
from .staging import Staging

_STAGING = "staging"


@dataclass(frozen=True)
class ExportOptions:
    """shard: several files and an index; prefix: goes into file names as transformers' `variant` does; limit: bytes
    of a file.
    """

    shard: bool = False
    prefix: str | None = None
    limit: int = 1 << 30

    def __post_init__(self) -> None:
        if self.prefix is not None and (
            not self.prefix or os.path.basename(self.prefix) != self.prefix or self.prefix.startswith(".")
        ):
            raise ValueError(f"prefix={self.prefix!r} goes into file names: use letters and digits, such as 'fp16'")

    def file_name(self, number: int, total: int) -> str:
        stem = "model" if self.prefix is None else f"model.{self.prefix}"
        return f"{stem}.safetensors" if total == 1 else f"{stem}-{number + 1:05d}-of-{total:05d}.safetensors"

    @property
    def index_name(self) -> str:
        return "model.safetensors.index" + ("" if self.prefix is None else f".{self.prefix}") + ".json"


@dataclass(frozen=True)
class _Own:
    """A part of a tensor that this rank saves; `data` has the shape of the part's box."""

    name: str
    full_shape: tuple[int, ...]
    part: Part
    data: torch.Tensor

    @property
    def is_whole(self) -> bool:
        return self.part.box.size == self.full_shape


def save_model(
    path: Path,
    model: nn.Module,
    position: Position,
    agreement: Agreement,
    background: Background,
    options: ExportOptions,
    use_async: bool = False,
    optimizer: Any = None,
) -> None:
    """Write the working weights of `model` so that `from_pretrained(path)` gives them back bit by bit, or what
    `optimizer` steps on in their place. All ranks must call.

    A `path` that ends in .safetensors is one file without a config; any other is a directory.
    """
    check_request(path, model, options)
    background.wait()
    what = f"saving {path}"
    as_file = path.suffix == ".safetensors"
    exporter = Exporter(model)
    own, error = attempt(lambda: _collect(model, position, exporter, optimizer))
    agreement.check(error, what)
    staging, error = attempt(lambda: _prepare(path) if position.rank == 0 else None)
    agreement.check(error, what)
    if use_async:
        try:
            copies = snapshot([item.data for item in own])
        except BaseException:
            if staging is not None:
                staging.release()
            raise
        own = [_Own(item.name, item.full_shape, item.part, copy) for item, copy in zip(own, copies, strict=True)]

    def job() -> None:
        try:
            _Export(path, own, exporter, position, agreement, options, as_file).run()
        except BaseException:
            if position.rank == 0:
                attempt(lambda: remove_tree(new_path(path)) if new_path(path).exists() else None)
            raise
        finally:
            if staging is not None:
                staging.release()

    if use_async:
        background.start(job)
    else:
        job()


def check_request(path: Path, model: nn.Module, options: ExportOptions) -> None:
    """What a rank can refuse by itself."""
    if path.suffix == ".safetensors" and (options.shard or options.prefix is not None):
        raise ValueError(f"path={path.name!r} is one file: with shard=True or prefix= give the path of a directory")
    if hasattr(model, "peft_config"):
        raise ValueError(
            "save_model of a model with LoRA adapters: booster.save_lora_as_pretrained(model, path) writes the "
            "adapters; where every rank holds all weights, model.merge_and_unload() gives a plain model to save"
        )


def _collect(model: nn.Module, position: Position, exporter: Exporter, optimizer: Any) -> list[_Own]:
    masters: dict[str, list[ParamShard]] = {}
    if optimizer is not None:
        parts = parts_of_optimizer(optimizer, model, position)
        masters = {name: [] for name in parts.trained()}
        for shard in parts.shards():
            masters[shard.name] += [shard] if shard.is_writer else []
    own = []
    for held in held_tensors(model, position):
        name = exporter.name_of(held.name, held.aliases)
        if name is None:
            continue
        for shard in masters.get(held.name, ()):
            coordinate = position.coordinate(shard.spec.axis)
            boxes = parts_of(shard.spec, coordinate, shard.local_shape, shard.start, shard.stop, owned=True)
            own += [_Own(name, shard.spec.full_shape, part, part.view(shard.master)) for part in boxes]
        if held.is_writer and held.name not in masters:
            flat = held.tensor.reshape(-1)
            if optimizer is not None and flat.is_floating_point():
                flat = flat.float()  # as wide as the masters beside it
            own += [_Own(name, held.spec.full_shape, part, part.view(flat)) for part in held.parts(owned=True)]
    return own


def _prepare(path: Path) -> Staging:
    if path.is_symlink() or (path.exists() and path.is_dir() == (path.suffix == ".safetensors")):
        raise ValueError(
            f"cannot save to {path}: a {'file' if path.is_file() else 'link or directory'} of that name is there"
        )
    staging = Staging(new_path(path), path)
    try:
        make_directory(new_path(path) / _STAGING)
    except BaseException:
        staging.release()
        raise
    return staging


class _Export:
    """One save, from the parts that each rank owns to the files."""

    def __init__(
        self,
        path: Path,
        own: Sequence[_Own],
        exporter: Exporter,
        position: Position,
        agreement: Agreement,
        options: ExportOptions,
        as_file: bool,
    ) -> None:
        self.path, self.directory = path, new_path(path)
        self.own, self.exporter, self.options, self.as_file = own, exporter, options, as_file
        self.position, self.agreement = position, agreement
        self.what = f"saving {path}"

    def run(self) -> None:
        writers = self._deal()
        index = self._stage(writers)
        files, error = attempt(lambda: self._files(writers, index))
        self.agreement.check(error, self.what)
        counts = self.agreement.gather(len(files))
        first, total = sum(counts[: self.position.rank]), sum(counts)
        names = [self.options.file_name(first + number, total) for number in range(len(files))]
        _, error = attempt(
            lambda: [write_tensors(self.directory / name, file) for name, file in zip(names, files, strict=True)]
        )
        self.agreement.check(error, self.what)
        tables = self.agreement.gather(
            [
                [name, [item.name for item in file], sum(item.nbytes for item in file)]
                for name, file in zip(names, files, strict=True)
            ]
        )
        dtypes = self.agreement.gather([str(item.data.dtype) for item in self.own if item.data.is_floating_point()][:1])
        dtype = next((getattr(torch, found[0].removeprefix("torch.")) for found in dtypes if found), None)
        _, error = attempt(
            lambda: (
                self._finish([entry for table in tables for entry in table], total, dtype) if self._is_first else None
            )
        )
        self.agreement.check(error, self.what)

    @property
    def _is_first(self) -> bool:
        return self.position.rank == 0

    def _deal(self) -> dict[str, int]:
        """The rank that writes each unit: the one that holds all of it, else ranks in turn, by bytes."""
        mine: dict[str, list[Any]] = {}
        for item in self.own:
            unit = mine.setdefault(self.exporter.unit_of(item.name), [True, 0])
            unit[0] = unit[0] and item.is_whole
            unit[1] += item.data.numel() * item.data.itemsize
        everyone = self.agreement.gather(mine)
        units = list(dict.fromkeys(unit for table in everyone for unit in table))
        if not self.options.shard:
            return dict.fromkeys(units, 0)
        writers, loads = {}, [0] * self.position.world_size
        shared = []
        for unit in units:
            holders = [rank for rank, table in enumerate(everyone) if unit in table]
            if len(holders) == 1 and everyone[holders[0]][unit][0]:
                writers[unit] = holders[0]
                loads[holders[0]] += everyone[holders[0]][unit][1]
            else:
                shared.append((unit, sum(everyone[rank][unit][1] for rank in holders)))
        for unit, size in shared:
            rank = loads.index(min(loads))
            writers[unit] = rank
            loads[rank] += size
        return writers

    def _stage(self, writers: dict[str, int]) -> TensorIndex:
        """Write what other ranks need of this rank's parts (and this rank's own parts of those tensors); an index of
        everyone's.
        """
        chunks = [
            Chunk(item.name, item.full_shape, item.part.box, item.data)
            for item in self.own
            if not (item.is_whole and writers[self.exporter.unit_of(item.name)] == self.position.rank)
        ]
        name = f"rank-{self.position.rank:05d}.safetensors"
        staging = self.directory / _STAGING
        if chunks:
            _, error = attempt(
                lambda: write_tensors(staging / name, [pending(str(n), chunk.data) for n, chunk in enumerate(chunks)])
            )
        else:
            error = None
        self.agreement.check(error, self.what)
        return TensorIndex(staging, self.agreement.gather(describe({name: chunks})))

    def _files(self, writers: dict[str, int], index: TensorIndex) -> list[list[Pending]]:
        """The tensors of each file of this rank, in the order of the model."""
        units: dict[str, list[Pending]] = {}
        written: set[str] = set()  # a buffer is on every stage, so that another one may have staged it
        for item in self.own:
            unit = self.exporter.unit_of(item.name)
            if item.is_whole and writers[unit] == self.position.rank:
                units.setdefault(unit, []).append(pending(item.name, item.data))
                written.add(item.name)
        for name, entry in index.entries.items():
            unit = self.exporter.unit_of(name)
            if writers[unit] == self.position.rank and name not in written:
                units.setdefault(unit, []).append(Pending(name, entry.dtype, entry.shape, _reading(index, name)))
        limit = self.options.limit if self.options.shard else None
        files: list[list[Pending]] = []
        filled = 0
        for members in units.values():
            converted = self._converted(members)
            for tensor in converted:
                if not files or (limit is not None and filled + tensor.nbytes > limit and filled):
                    files.append([])
                    filled = 0
                files[-1].append(tensor)
                filled += tensor.nbytes
        return files

    def _converted(self, members: list[Pending]) -> list[Pending]:
        if not self.exporter.converts:
            return members
        shapes = self.exporter.revert(
            {item.name: torch.empty(item.shape, dtype=item.dtype, device="meta") for item in members}
        )
        unit = _Unit(members, self.exporter)
        return [Pending(name, shape.dtype, tuple(shape.shape), unit.fetching(name)) for name, shape in shapes.items()]

    def _finish(self, table: Sequence[Any], total: int, dtype: torch.dtype | None) -> None:
        remove_tree(self.directory / _STAGING)
        if self.as_file:
            rename(self.directory / table[0][0], self.path)
            sync_directory(self.path.parent)
            remove_tree(self.directory)
            return
        if total > 1:
            weight_map = {name: file for file, names, _ in table for name in names}
            index = {
                "metadata": {"total_size": sum(size for _, _, size in table)},
                "weight_map": dict(sorted(weight_map.items())),
            }
            write_file(self.directory / self.options.index_name, (json.dumps(index, indent=2) + "\n").encode())
        self.exporter.write_config(self.directory, dtype)
        sync_directory(self.directory)
        if not self.path.exists():
            rename(self.directory, self.path)
        else:
            self._replace_files()
        sync_directory(self.path.parent)

    def _replace_files(self) -> None:
        """Into a directory that exists (it may hold a tokenizer): weights first, the index that names them last."""
        fresh = sorted(self.directory.iterdir(), key=lambda file: (file.name == self.options.index_name, file.name))
        names = {file.name for file in fresh}
        for file in fresh:
            rename(file, self.path / file.name)
        stem = "model" if self.options.prefix is None else f"model.{self.options.prefix}"
        for stale in [
            *self.path.glob(f"{stem}-?????-of-?????.safetensors"),
            self.path / f"{stem}.safetensors",
            self.path / self.options.index_name,
        ]:
            if stale.name not in names and stale.is_file():
                stale.unlink()
        sync_directory(self.path)
        remove_tree(self.directory)


class _Unit:
    """Tensors that are converted together, when the first of them is written; each is let go of once it was fetched."""

    def __init__(self, members: Sequence[Pending], exporter: Exporter) -> None:
        self._members, self._exporter = members, exporter
        self._made: dict[str, torch.Tensor] = {}

    def fetching(self, name: str) -> Callable[[], torch.Tensor]:
        def fetch() -> torch.Tensor:
            if name not in self._made:
                self._made = self._exporter.revert({item.name: item.fetch().detach().cpu() for item in self._members})
            return self._made.pop(name)

        return fetch


def _reading(index: TensorIndex, name: str) -> Callable[[], torch.Tensor]:
    return lambda: index.read_whole(name)
