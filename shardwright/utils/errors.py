"""Pieces of error messages: what a value should have been."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path


def nearest(value: object, known: Iterable[str]) -> str:
    """` - did you mean 'x'?` for the known name closest to `value`, or an empty string."""
    matches = difflib.get_close_matches(str(value), list(known), n=1, cutoff=0.5)
    return f" - did you mean {matches[0]!r}?" if matches else ""


def nearest_file(path: Path, is_file: bool = True) -> str:
    """The same for a path that does not exist, of what is beside it; files alone, unless a directory would do."""
    beside = path.parent.glob("*") if path.parent.is_dir() else ()
    return nearest(path.name, [one.name for one in beside if one.is_file() or not is_file])


def one_of(field: str, value: object, known: Sequence[str]) -> ValueError:
    """The error for a value outside a closed list."""
    listed = ", ".join(repr(name) for name in known)
    return ValueError(f"{field}={value!r} is not one of {listed}{nearest(value, known)}")


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def said_in_model(error: BaseException | None) -> str:
    """What an error says in its first line, and the last line of a model's own code that it passed, which did not raise
    it itself: `ValueError: no such mask, at y = y * mask (modeling_x.py, line 12)`.
    """
    words = next(iter(str(error).splitlines()), "").partition("; use ")[0]
    said = f"{type(error).__name__}: {words}"
    if error is None:
        return said
    frames = [
        traceback.FrameSummary(frame.f_code.co_filename, number, frame.f_code.co_name)
        for frame, number in traceback.walk_tb(error.__traceback__)
        if _is_foreign(frame.f_globals.get("__name__", ""))
    ]
    frames = [frame for frame in frames if frame.line and not frame.line.startswith(("raise", "assert"))]
    if not frames:
        return said
    file = frames[-1].filename.replace("\\", "/").rpartition("/")[2]
    return f"{said}, at {frames[-1].line} ({file}, line {frames[-1].lineno})"


def _is_foreign(module: str) -> bool:
    """Whether code of this module is a model's own, and not a library's."""
    if module.startswith("transformers."):
        return module.startswith("transformers.models.")
    return module.partition(".")[0] not in ("torch", "shardwright", "transformers")


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 rank`, `2 ranks`: a number and what it counts; `plural` where that is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
