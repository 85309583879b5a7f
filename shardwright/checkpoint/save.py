"""Writing a resumable checkpoint: every byte once, by the rank that owns it."""

from __future__ import annotations

import json
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

from torch import nn

from ..files.boxes import parts_of, whole
from ..files.disk import sync_directory, write_file
from ..files.tensor_file import pending, write_tensors
from ..interface import OptimizerWrapper
from ..spec import ParamSpec
from . import rng
from .agreement import Agreement, attempt
from .background import Background, snapshot
from .directory import candidates, discard, new_path, prepare, publish, retain
from .held import held_tensors
from .index import Chunk, describe
from .manifest import Manifest, commit
from .optimizer_parts import hyperparameters, parts_of_optimizer
from .plain_data import encode
from .position import Position

STATE = "state.json"
MOST_STEPS = 2**63  # that a job counts


@dataclass(frozen=True)
class Contents:
    """What one rank puts into a checkpoint.

    chunks  tensors; live views until they are written or copied
    table   what this rank notes beside them (JSON data)
    state   what rank 0 notes for all (JSON data)
    """

    chunks: Sequence[Chunk]
    table: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)


def collect(
    position: Position,
    *,
    model: nn.Module | None = None,
    optimizer: Any = None,
    owner: nn.Module | None = None,
    lr_scheduler: Any = None,
    dataloader: Any = None,
    step: SupportsIndex | None = None,
    extra: Any = None,
    with_rng: bool = True,
) -> Contents:
    """`model` is this rank's part; `owner` is the model that `optimizer` trains where `model` itself is not to be
    saved.
    """
    chunks: list[Chunk] = []
    groups: dict[str, int] = {}
    if optimizer is not None:
        parts = parts_of_optimizer(optimizer, _module_of(model, owner, optimizer), position)
        groups = parts.trained()
        for shard in parts.shards():
            if shard.is_writer:
                coordinate = position.coordinate(shard.spec.axis)
                for part in parts_of(shard.spec, coordinate, shard.local_shape, shard.start, shard.stop, owned=True):
                    names = {
                        f"weights/{shard.name}": shard.master,
                        **{f"state/{key}/{shard.name}": v for key, v in shard.state.items()},
                    }
                    chunks += [
                        Chunk(name, shard.spec.full_shape, part.box, part.view(flat)) for name, flat in names.items()
                    ]
                if shard.start == 0 and _is_first(shard.spec, coordinate):
                    for key, value in shard.extra.items():
                        chunks.append(Chunk(f"extra/{key}/{shard.name}", tuple(value.shape), whole(value.shape), value))
    if model is not None:
        for held in held_tensors(model, position):
            if held.is_writer and held.name not in groups:
                flat = held.tensor.reshape(-1)
                chunks += [
                    Chunk(f"weights/{held.name}", held.spec.full_shape, part.box, part.view(flat))
                    for part in held.parts(owned=True)
                ]
    if with_rng:
        for kind, state in rng.get_states().items():
            chunks.append(Chunk(f"rng/{kind}/{position.rank}", tuple(state.shape), whole(state.shape), state))
    table = {
        "coordinates": dict(position.coordinates),
        "sizes": dict(position.sizes),
        "groups": groups if position.coordinate("dp_sp") == position.coordinate("tp") == 0 else {},
        "amax_history": _amax_history(optimizer),
        "dataloader": None if dataloader is None else encode(_dataloader_state(dataloader), "dataloader.state_dict()"),
    }
    return Contents(chunks, table, _shared_state(optimizer, lr_scheduler, step, extra))


def _amax_history(optimizer: Any) -> dict[str, Any]:
    """Of the linears that this rank has; those who share them know the same."""
    history = optimizer.amax_history if isinstance(optimizer, OptimizerWrapper) else None
    return {} if history is None else dict(history.state_dict())


def _module_of(model: nn.Module | None, owner: nn.Module | None, optimizer: Any) -> nn.Module:
    found = model if model is not None else owner
    if found is None:
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: boost it with its model, or pass model= too, so that "
            "its state has names"
        )
    return found


def _is_first(spec: ParamSpec, coordinate: int) -> bool:
    return not spec.is_sharded or coordinate == 0


def _dataloader_state(dataloader: Any) -> Any:
    if not hasattr(dataloader, "state_dict"):
        raise ValueError(
            f"dataloader={type(dataloader).__name__} cannot tell its position (it has no state_dict): use "
            "plugin.prepare_dataloader, or leave dataloader out"
        )
    return dataloader.state_dict()


def _shared_state(optimizer: Any, lr_scheduler: Any, step: SupportsIndex | None, extra: Any) -> dict[str, Any]:
    scaler = optimizer.scaler if isinstance(optimizer, OptimizerWrapper) else None
    return {
        "step": None if step is None else _number_of_steps(step),
        "extra": encode(extra if extra is not None else {}, "extra"),
        "param_groups": None
        if optimizer is None
        else encode(hyperparameters(optimizer.param_groups), "optimizer.param_groups"),
        "scaler": None if scaler is None else encode(scaler.state_dict(), "the loss scaler"),
        "lr_scheduler": None
        if lr_scheduler is None
        else encode(lr_scheduler.state_dict(), "lr_scheduler.state_dict()"),
    }


def _number_of_steps(step: Any) -> int:
    try:
        if not isinstance(step, bool) and 0 <= operator.index(step) < MOST_STEPS:
            return operator.index(step)
    except TypeError:
        pass  # said below
    raise ValueError(f"step={step!r} must be a whole number from 0 on, or None")


def save(
    path: Path,
    gather: Callable[[], Contents],
    position: Position,
    agreement: Agreement,
    background: Background,
    *,
    use_async: bool = False,
    keep_last: int | None = None,
    size_per_file: int | None = None,
) -> None:
    """Write what `gather` returns on each rank to the directory `path`. All ranks must call.

    use_async      return once the tensors are copied to host memory; `background.wait()` until they are on disk
    keep_last      afterwards remove older checkpoints beside `path`, except this many of the newest
    size_per_file  bytes of a rank's file, None for one file per rank
    """
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1, or None to keep all checkpoints")
    background.wait()
    what = f"saving {path}"
    contents, error = attempt(gather)
    agreement.check(error, what)
    _, error = attempt(lambda: prepare(path, keep_last is not None) if position.rank == 0 else None)
    agreement.check(error, what)
    assert contents is not None
    if use_async:
        copies = snapshot([chunk.data for chunk in contents.chunks])
        contents = Contents(
            [chunk._replace(data=copy) for chunk, copy in zip(contents.chunks, copies, strict=True)],
            contents.table,
            contents.state,
        )
    ready = contents

    def job() -> None:
        try:
            _write(path, ready, position, agreement, keep_last, size_per_file)
        except BaseException:
            if position.rank == 0:
                attempt(lambda: discard(path))
            raise

    if use_async:
        background.start(job)
    else:
        job()


def _write(
    path: Path,
    contents: Contents,
    position: Position,
    agreement: Agreement,
    keep_last: int | None,
    size_per_file: int | None,
) -> None:
    directory, what = new_path(path), f"saving {path}"
    files, error = attempt(lambda: _write_rank(directory, contents, position, size_per_file))
    agreement.check(error, what)
    everyone = agreement.gather(files)
    error = None
    if position.rank == 0:
        merged = {name: (size, crc) for table in everyone for name, (size, crc) in table.items()}
        _, error = attempt(lambda: _finish(path, directory, merged, contents, position, keep_last))
    agreement.check(error, what)


def _write_rank(
    directory: Path, contents: Contents, position: Position, size_per_file: int | None
) -> dict[str, tuple[int, int]]:
    """This rank's files; returns their sizes and checksums."""
    stem = f"rank-{position.rank:05d}"
    groups = _split(contents.chunks, size_per_file)
    names = (
        [f"{stem}.safetensors"]
        if len(groups) == 1
        else [f"{stem}-{number:04d}.safetensors" for number in range(len(groups))]
    )
    files = {
        name: write_tensors(directory / name, [pending(str(number), chunk.data) for number, chunk in enumerate(chunks)])
        for name, chunks in zip(names, groups, strict=True)
    }
    table = {**contents.table, "tensors": describe(dict(zip(names, groups, strict=True)))}
    files[f"{stem}.json"] = write_file(directory / f"{stem}.json", json.dumps(table).encode())
    if position.rank == 0:
        files[STATE] = write_file(directory / STATE, json.dumps(contents.state).encode())
    return files


def _split(chunks: Sequence[Chunk], limit: int | None) -> list[list[Chunk]]:
    groups: list[list[Chunk]] = [[]]
    filled = 0
    for chunk in chunks:
        size = chunk.data.numel() * chunk.data.itemsize
        if limit is not None and groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(chunk)
        filled += size
    return groups


def _finish(
    path: Path,
    directory: Path,
    files: dict[str, tuple[int, int]],
    contents: Contents,
    position: Position,
    keep_last: int | None,
) -> None:
    sync_directory(directory)
    others, _ = candidates(path.parent)
    saved_at = max([time.time_ns(), *(other.saved_at + 1 for other in others)])  # clocks may be set back
    commit(directory, Manifest(files, saved_at, contents.state.get("step"), position.world_size))
    publish(path)
    if keep_last is not None:
        retain(path, keep_last)
