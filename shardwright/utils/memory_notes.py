"""What is said when a device has no memory left: a table of what holds it, as a note on the error, and a snapshot.

note_memory(error)             adds what the tellers say, if memory is what has failed
tell_memory_by(model, teller)  `teller(at_failure)` is asked while `model` lives
write_snapshots_to(directory)  oom-rank0.pickle, ... for pytorch.org/memory_viz
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

SNAPSHOTS = "SHARDWRIGHT_OOM_SNAPSHOTS"  # a directory, in the environment
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_AMOUNT = r"([0-9.]+) (bytes|KiB|MiB|GiB)"


class AtFailure(NamedTuple):
    """Bytes, as torch's error states them; None where it does not.

    wanted     that could not be had
    allocated  by tensors
    reserved   by torch beside them
    """

    wanted: int | None
    allocated: int | None
    reserved: int | None


Teller = Callable[[AtFailure], str]

_tellers: list[tuple[weakref.ref[Any], Teller]] = []
_directory: Path | None = None
_is_observing = False


def tell_memory_by(owner: Any, teller: Teller) -> None:
    """`teller` must not hold `owner`."""
    _tellers[:] = [(ref, each) for ref, each in _tellers if ref() is not None]
    _tellers.append((weakref.ref(owner), teller))


def note_memory(error: BaseException) -> None:
    """Once for an error, wherever it passes."""
    found = _out_of_memory(error)
    if found is None or "is_told" in vars(found):
        return
    vars(found)["is_told"] = True
    at_failure = read_error(str(found))
    for ref, teller in _tellers:
        if ref() is not None:
            try:
                error.add_note(teller(at_failure))
            except Exception as other:  # which must not hide the error
                error.add_note(f"what holds the memory is not known: {type(other).__name__}: {other}")


def read_error(text: str) -> AtFailure:
    """What torch says in its error."""

    def amount(pattern: str) -> int | None:
        match = re.search(pattern.replace("#", _AMOUNT), text)
        return None if match is None else round(float(match[1]) * _UNITS[match[2]])

    return AtFailure(
        amount("Tried to allocate #"), amount("# is allocated by PyTorch"), amount("# is reserved by PyTorch")
    )


def write_snapshots_to(directory: Path | None) -> None:
    """Where a snapshot of CUDA's allocator is written when it has no memory left; None: where the environment says."""
    global _directory, _is_observing
    _directory = directory
    # What there was is gone when the error is caught; the hook has no public name (torch 2.11 to 2.13).
    if torch.cuda.is_available() and not _is_observing and snapshot_directory() is not None:
        torch.cuda.init()
        observe = torch._C._cuda_attach_out_of_memory_observer  # type: ignore[attr-defined]
        observe(lambda *_: write_snapshot(torch.cuda.memory._dump_snapshot))
        _is_observing = True


def snapshot_directory() -> Path | None:
    """Where snapshots go; None: nowhere."""
    return _directory or (Path(os.environ[SNAPSHOTS]) if os.environ.get(SNAPSHOTS) else None)


def write_snapshot(dump: Callable[[str], Any]) -> Path | None:
    """`dump` writes the allocator's state to a file. A full disk must not hide what has failed."""
    directory = snapshot_directory()
    if directory is None:
        return None
    path = directory / f"oom-rank{os.environ.get('RANK', '0')}.pickle"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        dump(str(path))
    except OSError:
        return None
    return path


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error itself or what it is due to."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error
