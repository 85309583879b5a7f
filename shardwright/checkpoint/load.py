"""Reading a resumable checkpoint into any layout: the newest one that proves whole, and of it only what a rank
needs.
"""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files.boxes import parts_of
from ..files.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, UnsafeCheckpoint
from ..files.paths import inside, read_json
from ..interface import OptimizerWrapper
from ..interface.shards import LoadedShard, ShardedOptimizer
from . import rng
from .agreement import Agreement, attempt
from .directory import candidates, not_found
from .held import Held, held_tensors
from .index import TensorIndex
from .manifest import read_manifest, verify
from .optimizer_parts import load_hyperparameters, parts_of_optimizer
from .plain_data import as_before, decode
from .position import Position
from .save import MOST_STEPS, STATE, _module_of

_READABLE = (CheckpointError, UnsafeCheckpoint, OSError)


class Opened:
    """A verified checkpoint: its tensors, and what was noted beside them."""

    def __init__(self, directory: Path) -> None:
        manifest = read_manifest(directory)
        self.directory = directory
        self.tables: list[dict[str, Any]] = []
        for rank in range(manifest.world_size):
            name = f"rank-{rank:05d}.json"
            if name not in manifest.files:
                raise CheckpointDamaged(directory / "manifest.json", f"does not list {name}")
            self.tables.append(read_json(inside(directory, name)))
        self.index = TensorIndex(directory, [table["tensors"] for table in self.tables])
        strangers = {place.file for entry in self.index.entries.values() for place in entry.places} - set(
            manifest.files
        )
        if strangers:
            raise UnsafeCheckpoint(
                f"{directory}: the index names files that the manifest does not list: "
                f"{', '.join(sorted(strangers)[:3])}"
            )
        self.state: dict[str, Any] = read_json(inside(directory, STATE))
        _require_described(directory, self.tables, self.state)

    @property
    def names(self) -> set[str]:
        """Parameters and buffers whose values are saved."""
        return {name.removeprefix("weights/") for name in self.index.entries if name.startswith("weights/")}

    def states_of(self, kind: str) -> Mapping[str, list[str]]:
        """Parameter -> keys of its optimizer state, for "state" or "extra"."""
        found: dict[str, list[str]] = {}
        for name in self.index.entries:
            first, _, rest = name.partition("/")
            if first == kind:
                key, _, parameter = rest.partition("/")
                found.setdefault(parameter, []).append(key)
        return found


_OF_NUMBERS = ("coordinates", "sizes", "groups")  # by name
_STATE = ("step", "extra", "param_groups", "scaler", "lr_scheduler")


def _require_described(directory: Path, tables: list[Any], state: Any) -> None:
    """UnsafeCheckpoint where what ranks noted is not of the kinds that `save` writes."""
    for rank, table in enumerate(tables):
        for name in _OF_NUMBERS:
            values = table.get(name)
            if not isinstance(values, dict) or not all(type(value) is int for value in values.values()):
                raise UnsafeCheckpoint(f"{directory}: {name} of rank {rank} is not a table of numbers")
        if "dataloader" not in table or not isinstance(table.get("amax_history", {}), dict):
            raise UnsafeCheckpoint(f"{directory}: the notes of rank {rank} are not what a save writes")
        if not all(size > 0 for size in table["sizes"].values()):
            raise UnsafeCheckpoint(f"{directory}: an axis of rank {rank} has no size")
    if not isinstance(state, dict) or not set(_STATE) <= set(state):
        raise UnsafeCheckpoint(f"{directory}: {STATE} lacks one of {', '.join(_STATE)}")
    if not (state["step"] is None or (type(state["step"]) is int and 0 <= state["step"] < MOST_STEPS)):
        raise UnsafeCheckpoint(f"{directory}: {reprlib.repr(state['step'])} is no number of a step")
    for number, group in enumerate(state["param_groups"] if isinstance(state["param_groups"], list) else ()):
        rate = decode(group["lr"]) if isinstance(group, dict) and "lr" in group else None
        if isinstance(rate, float | torch.Tensor) and not bool(torch.as_tensor(rate).isfinite().all()):
            raise UnsafeCheckpoint(f"{directory}: the learning rate of param group {number} is {rate}")


def find(path: Path, agreement: Agreement, rank: int, check: bool = True) -> tuple[Opened, list[str]]:
    """The newest checkpoint at or below `path` that is whole, and a line for each newer one that is not. All ranks must
    call.

    check   compare checksums of all files, dealt over the ranks; without, only sizes
    """
    found, error = attempt(lambda: candidates(path) if rank == 0 else ([], []))
    agreement.check(error, f"looking for checkpoints in {path}")
    listed, skipped = agreement.broadcast([[str(candidate.path) for candidate in found[0]], found[1]])
    for line in skipped:
        _warn(f"skipped: {line}", rank)
    last: dict[str, str] | None = None
    for name in listed:
        opened, problem = _open(Path(name), agreement, rank, check)
        if problem is None:
            assert opened is not None
            return opened, skipped
        last = problem
        skipped.append(f"{problem['text']} (checkpoint {name})")
        if len(listed) > 1:
            _warn(f"checkpoint {name} is damaged and skipped: {problem['text']}", rank)
    if last is not None and len(listed) == 1:
        raise _as_error(last)
    raise not_found(path, skipped)


def _open(directory: Path, agreement: Agreement, rank: int, check: bool) -> tuple[Opened | None, dict[str, str] | None]:
    def verified() -> Opened:
        manifest = read_manifest(directory)
        verify(directory, manifest, (rank, agreement.world_size) if check else (-1, 1))
        return Opened(directory)

    try:
        opened, problem = verified(), None
    except _READABLE as error:
        opened, problem = (
            None,
            {"kind": type(error).__name__, "file": str(getattr(error, "file", directory)), "text": str(error)},
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        opened, problem = (
            None,
            {"kind": "UnsafeCheckpoint", "file": str(directory), "text": f"{directory}: not as described ({error!r})"},
        )
    problems = [found for found in agreement.gather(problem) if found is not None]
    return (None, problems[0]) if problems else (opened, None)


def _as_error(problem: dict[str, str]) -> Exception:
    if problem["kind"] == "UnsafeCheckpoint":
        return UnsafeCheckpoint(problem["text"])
    if problem["kind"] == "CheckpointDamaged":
        return CheckpointDamaged(Path(problem["file"]), problem["text"].removeprefix(problem["file"]).strip())
    return CheckpointError(problem["text"])


def _warn(text: str, rank: int) -> None:
    if rank == 0:
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def load(
    path: Path,
    position: Position,
    agreement: Agreement,
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    owner: nn.Module | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    check: bool = True,
    with_rng: bool = True,
) -> dict[str, Any]:
    """Resume from the newest whole checkpoint at or below `path`. All ranks must call.

    Returns {"step", "extra", "path": the checkpoint taken, "skipped": why newer ones were not}.
    """
    opened, skipped = find(path, agreement, position.rank, check)
    parts = None if optimizer is None else parts_of_optimizer(optimizer, _module_of(model, owner, optimizer), position)
    held = [] if model is None else held_tensors(model, position)
    _check_fit(opened, held, parts, agreement, complete=model is not None)
    shards, error = attempt(lambda: _read(opened, position, held, parts))
    agreement.check(error, f"loading {opened.directory}")  # before load_shards, which communicates
    if parts is not None:
        _load_optimizer(opened, optimizer, parts, shards)
    if lr_scheduler is not None:
        load_lr_scheduler(lr_scheduler, opened.state["lr_scheduler"], opened.directory)
    if dataloader is not None:
        _load_dataloader(dataloader, opened, position)
    if with_rng:
        _load_rng(opened, position)
    return {
        "step": opened.state["step"],
        "extra": decode(opened.state["extra"]),
        "path": str(opened.directory),
        "skipped": skipped,
    }


def _check_fit(
    opened: Opened, held: list[Held], parts: ShardedOptimizer | None, agreement: Agreement, complete: bool
) -> None:
    """Compare names, shapes and param groups on all ranks before anything is written to."""
    index = opened.index
    shapes = {item.name: item.spec.full_shape for item in held}
    groups = {} if parts is None else parts.trained()
    if parts is not None:
        shapes |= {shard.name: shard.spec.full_shape for shard in parts.shards()}
    missing = [name for name in {**shapes, **groups} if f"weights/{name}" not in index]
    mismatched = [
        f"{name} (saved {index.entries[f'weights/{name}'].shape}, here {shape})"
        for name, shape in shapes.items()
        if f"weights/{name}" in index and index.entries[f"weights/{name}"].shape != shape
    ]
    saved_groups = {name: group for table in opened.tables for name, group in table["groups"].items()}
    regrouped = [
        f"{name} (saved in group {saved_groups[name]}, here in group {groups[name]})"
        for name in groups
        if name in saved_groups and saved_groups[name] != groups[name]
    ]
    if parts is not None and opened.state["param_groups"] is None:
        raise CheckpointMismatch(
            opened.directory, missing=["the whole optimizer: the checkpoint was saved without one"], what="optimizer"
        )
    report = agreement.gather([missing, mismatched, regrouped])
    everyone = [sorted({name for rank in report for name in rank[kind]}) for kind in range(3)]
    unexpected = []
    if complete:
        names = sorted(opened.names)
        claimed = agreement.union([name in shapes or name in groups for name in names])
        unexpected = [name for name, used in zip(names, claimed, strict=True) if not used]
    if any(everyone[:2]) or unexpected:
        raise CheckpointMismatch(opened.directory, everyone[0], unexpected, everyone[1])
    if everyone[2]:
        raise CheckpointMismatch(opened.directory, mismatched=everyone[2], what="optimizer's param groups")


def _read(
    opened: Opened, position: Position, held: list[Held], parts: ShardedOptimizer | None
) -> dict[str, LoadedShard]:
    """Fill masters and untrained tensors; returns the optimizer's states."""
    shards = {} if parts is None else _read_optimizer(opened, position, parts)
    trained = set() if parts is None else set(parts.trained())
    for item in held:
        if item.name not in trained:
            read_held(opened.index, f"weights/{item.name}", item)
    return shards


def _load_optimizer(opened: Opened, optimizer: Any, parts: ShardedOptimizer, shards: dict[str, LoadedShard]) -> None:
    state = opened.state
    with as_saved(opened.directory, "param_groups"):
        load_hyperparameters(optimizer.param_groups, decode(state["param_groups"]))
    parts.load_shards(shards)
    scaler = optimizer.scaler if isinstance(optimizer, OptimizerWrapper) else None
    if scaler is not None and state["scaler"] is not None:
        with as_saved(opened.directory, "scaler"):
            scaler.load_state_dict(decode(state["scaler"]))
    history = optimizer.amax_history if isinstance(optimizer, OptimizerWrapper) else None
    if history is not None:
        with as_saved(opened.directory, "amax_history"):
            history.load_state_dict(
                {name: each for table in opened.tables for name, each in table.get("amax_history", {}).items()}
            )


@contextmanager
def as_saved(directory: Path, what: str) -> Iterator[None]:
    """UnsafeCheckpoint where what is loaded has not the form that whoever saved it gives it."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError) as error:
        raise UnsafeCheckpoint(f"{directory}: {what} is not of the form that a save writes ({error!r})") from error


def _load_dataloader(dataloader: Any, opened: Opened, position: Position) -> None:
    saved = opened.tables[_counterpart(opened, position)]["dataloader"]
    if saved is None:
        raise ValueError(f"{opened.directory} was saved without a dataloader; leave dataloader out")
    with as_saved(opened.directory, "dataloader"):
        dataloader.load_state_dict(decode(saved))


def read_held(source: Any, name: str, held: Held) -> None:
    """Fill this rank's range with its boxes of the tensor `name`; padding keeps its values."""
    flat = held.tensor.view(-1) if held.tensor.is_contiguous() else held.tensor.flatten()
    for part in held.parts(owned=False):
        source.read(name, part.box, part.view(flat))
    if not held.tensor.is_contiguous():
        held.tensor.copy_(flat.view(held.tensor.shape))


def _read_optimizer(opened: Opened, position: Position, parts: ShardedOptimizer) -> dict[str, LoadedShard]:
    """Masters are filled in place; states are new, since an optimizer that has not stepped has none yet."""
    index = opened.index
    per_element, whole_values = opened.states_of("state"), opened.states_of("extra")
    loaded = {}
    for shard in parts.shards():
        pieces = parts_of(
            shard.spec, position.coordinate(shard.spec.axis), shard.local_shape, shard.start, shard.stop, owned=False
        )
        for part in pieces:
            index.read(f"weights/{shard.name}", part.box, part.view(shard.master))
        weights_dtype = index.entries[f"weights/{shard.name}"].dtype
        state: dict[str, torch.Tensor] = {}
        for key in per_element.get(shard.name, ()):
            dtype = index.entries[f"state/{key}/{shard.name}"].dtype
            # states in the dtype of the weights follow it, others (fp32 moments of bf16 weights) keep theirs
            if dtype == weights_dtype:
                dtype = shard.master.dtype
            padded = sum(part.box.numel for part in pieces) < shard.stop - shard.start
            make = torch.zeros if padded else torch.empty
            state[key] = make(shard.stop - shard.start, dtype=dtype, device=shard.master.device)
            for part in pieces:
                index.read(f"state/{key}/{shard.name}", part.box, part.view(state[key]))
        extra = {key: index.read_whole(f"extra/{key}/{shard.name}") for key in whole_values.get(shard.name, ())}
        loaded[shard.name] = LoadedShard(None, state, extra)
    return loaded


def load_lr_scheduler(lr_scheduler: Any, saved: Any, where: Path) -> None:
    if saved is None:
        raise ValueError(f"{where} was saved without an lr scheduler; leave lr_scheduler out")
    current = lr_scheduler.state_dict()
    with as_saved(where, "lr_scheduler"):
        values = decode(saved)
        lr_scheduler.load_state_dict({key: as_before(current.get(key), value) for key, value in values.items()})


def _counterpart(opened: Opened, position: Position) -> int:
    """The saved rank whose random numbers and data this rank goes on with."""
    tables = opened.tables
    if len(tables) == position.world_size and tables[0]["sizes"] == dict(position.sizes):
        return position.rank
    replicas = tables[0]["sizes"].get("dp", 1)
    wanted = position.coordinate("dp") % replicas
    for rank, table in enumerate(tables):
        coordinates = table["coordinates"]
        if coordinates.get("dp", 0) == wanted and not any(coordinates.get(axis, 0) for axis in ("pp", "tp", "sp")):
            return rank
    raise CheckpointDamaged(opened.directory, f"has no rank of data-parallel coordinate {wanted}")


def _load_rng(opened: Opened, position: Position) -> None:
    rank = _counterpart(opened, position)
    names = [name for name in opened.index.entries if name.startswith("rng/") and name.endswith(f"/{rank}")]
    states = {name.split("/")[1]: opened.index.read_whole(name) for name in names}
    replicas = opened.tables[0]["sizes"].get("dp", 1)
    _set_rng(opened.directory, states, stream=position.coordinate("dp") // replicas)


def _set_rng(directory: Path, states: dict[str, torch.Tensor], stream: int) -> None:
    try:
        rng.set_states(states, stream)
    except (RuntimeError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UnsafeCheckpoint(
            f"{directory}: its random generators are in no state that they can have ({error})"
        ) from None
