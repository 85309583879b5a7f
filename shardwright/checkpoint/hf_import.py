"""Weights from any HuggingFace safetensors directory or file into a model of any layout, each rank reading its
slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files.boxes import Box, parts_of
from ..files.errors import CheckpointMismatch
from ..files.hf_names import ignored, tied_names
from ..files.huggingface import HfFiles, HfSource
from ..files.ties import are_equal
from ..interface.shards import ShardedOptimizer
from .agreement import Agreement, attempt
from .held import Held, held_tensors
from .load import find, read_held
from .manifest import MARKER
from .optimizer_parts import parts_of_optimizer
from .position import Position


@dataclass(frozen=True)
class LoadReport:
    """How weights and model differ in their names: the same on every rank."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)

    @property
    def missing_keys(self) -> list[str]:
        """As torch's `load_state_dict` calls them."""
        return self.missing

    @property
    def unexpected_keys(self) -> list[str]:
        return self.unexpected

    @property
    def fits(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)


class _IndexSource:
    """The weights of a resumable checkpoint behind the face of HfSource."""

    def __init__(self, path: Path, agreement: Agreement, rank: int) -> None:
        self._index = find(path, agreement, rank)[0].index
        self.keys = [name.removeprefix("weights/") for name in self._index.entries if name.startswith("weights/")]

    def __contains__(self, name: str) -> bool:
        return f"weights/{name}" in self._index

    def keys_of(self, name: str) -> list[str]:
        return [name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._index.entries[f"weights/{name}"].shape

    def read(self, name: str, box: Any, out: Any) -> None:
        self._index.read(f"weights/{name}", box, out)


class _StateSource:
    """A whole model's state dict behind the face of HfSource."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.keys = list(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def keys_of(self, name: str) -> list[str]:
        return [name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, box: Box, out: torch.Tensor) -> None:
        out.copy_(box.view(self.tensors[name], (0,) * self.tensors[name].ndim))


def load_model(
    path: Path, model: nn.Module, optimizer: Any, position: Position, agreement: Agreement, strict: bool
) -> LoadReport:
    """`optimizer` trains `model` or is None; its masters are read in their own precision and the weights follow them.

    strict   raise CheckpointMismatch, with nothing written, unless names and shapes agree; else load what fits and
             return the rest
    """
    held = held_tensors(model, position)
    source: Any
    if path.is_dir() and (path / MARKER).exists():
        source = _IndexSource(path, agreement, position.rank)
    else:
        names = [alias for item in held for alias in _names_of(item, model)]
        source, error = attempt(lambda: HfSource(HfFiles(path), model, names))
        agreement.check(error, f"loading {path}")
    return _take(source, path, held, model, optimizer, position, agreement, strict)


def load_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: Any, position: Position, agreement: Agreement, strict: bool
) -> LoadReport:
    """As `load_model`, from the state dict of a whole model, which every rank has."""
    source = _StateSource({name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)})
    held = held_tensors(model, position)
    return _take(source, Path("the state dict"), held, model, optimizer, position, agreement, strict)


def _take(
    source: Any,
    path: Path,
    held: list[Held],
    model: nn.Module,
    optimizer: Any,
    position: Position,
    agreement: Agreement,
    strict: bool,
) -> LoadReport:
    aliases = {alias: item.name for item in held for alias in _names_of(item, model)}
    found: dict[str, str] = {}  # name of the model -> name that the source knows it by
    for alias, name in aliases.items():
        if alias in source and name not in found:
            found[name] = alias
    differences, error = attempt(lambda: (_mismatched(source, held, found), _torn(source, aliases)))
    agreement.check(error, f"loading {path}")
    wrong, torn = differences
    may_miss, may_have = ignored(model, "missing"), ignored(model, "unexpected")
    missing = [item.name for item in held if item.name not in found and not any(map(may_miss, item.aliases))]
    used = {key for alias in aliases if alias in source for key in source.keys_of(alias)}
    keys = sorted(source.keys)
    claimed = agreement.union([key in used or may_have(key) for key in keys])
    lists = agreement.gather([missing, list(wrong.values()), torn])
    report = LoadReport(
        sorted({name for rank in lists for name in rank[0]}),
        [key for key, taken in zip(keys, claimed, strict=True) if not taken],
        sorted({line for rank in lists for line in rank[1]}),
    )
    if torn_anywhere := sorted({line for rank in lists for line in rank[2]}):
        raise ValueError(
            f"{path} does not fit the model: {'; '.join(torn_anywhere)}, and one of the two would be lost. Build the "
            "model with tie_word_embeddings=False, or by from_pretrained of these files, which keeps both; or take the "
            "wrong one out of the files"
        )
    if strict and not report.fits:
        raise CheckpointMismatch(
            path,
            report.missing,
            report.unexpected,
            report.mismatched,
            remedy="strict=False loads what fits and returns this list",
        )
    for name in wrong:
        del found[name]
    parts = None if optimizer is None else parts_of_optimizer(optimizer, model, position)
    _, error = attempt(lambda: _fill(source, found, held, parts, position))
    agreement.check(error, f"loading {path}")  # before masters are published, which communicates
    if parts is not None:
        parts.publish_masters()
    return report


def _mismatched(source: Any, held: list[Held], found: Mapping[str, str]) -> dict[str, str]:
    """Name of the model -> name and both shapes, for tensors that have another shape in `source`, or none."""
    wrong: dict[str, str] = {}
    for item in held:
        if item.name not in found:
            continue
        try:
            shape = source.shape(found[item.name])
        except CheckpointMismatch as error:
            wrong[item.name] = f"{'; '.join(error.mismatched)} (model {item.spec.full_shape})"
            continue
        if shape != item.spec.full_shape:
            wrong[item.name] = f"{item.name} (file {shape}, model {item.spec.full_shape})"
    return wrong


def _torn(source: Any, aliases: Mapping[str, str]) -> list[str]:
    """Tied tensors of the model for whose names `source` has different values."""
    torn: list[str] = []
    first_of: dict[str, str] = {}
    for alias, name in aliases.items():
        if alias in source and not are_equal(source, first := first_of.setdefault(name, alias), alias):
            torn.append(f"{alias} is tied to {first} in the model, but not equal to it here")
    return torn


def _names_of(item: Held, model: nn.Module) -> list[str]:
    """All names that a tensor may have in files."""
    names = [item.name, *item.aliases]
    if item.spec.tied is not None:  # its copies on other pipeline stages have names of their own
        ties = tied_names(model).items()
        names += [name for tie in ties if not set(tie).isdisjoint(names) for name in tie]
    return list(dict.fromkeys(names))


def _fill(
    source: Any, found: dict[str, str], held: list[Any], parts: ShardedOptimizer | None, position: Position
) -> None:
    trained = set() if parts is None else set(parts.trained())
    for shard in parts.shards() if parts is not None else ():
        if shard.name in found:
            coordinate = position.coordinate(shard.spec.axis)
            for part in parts_of(shard.spec, coordinate, shard.local_shape, shard.start, shard.stop, owned=False):
                source.read(found[shard.name], part.box, part.view(shard.master))
    for item in held:
        if item.name in found and item.name not in trained:
            read_held(source, found[item.name], item)
