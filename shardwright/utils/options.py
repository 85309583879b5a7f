"""Options of command lines, for argparse: what is wrong with one is a line, and no traceback."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def count(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def number(text: str) -> int:
    """A whole number, 0 included."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def rate(text: str) -> float:
    """A number above 0 that is finite, such as a learning rate."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def share(text: str) -> float:
    """From 0 to 1."""
    value = _float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; give a number from 0 to 1")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def directory(text: str) -> str:
    """A directory to write to. It is made now: that it cannot be is known before training."""
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made ({error.strerror}); name another one") from None
    return text


def pretrained(text: str) -> str:
    """A name on the hub, or the directory of a model: what can only be a path must be there."""
    if text.startswith(("/", "./", "../", "~")) and not (Path(text).expanduser() / "config.json").is_file():
        raise argparse.ArgumentTypeError(
            f"{text!r} has no config.json; name the directory that save_pretrained wrote, or a model of the hub"
        )
    return str(Path(text).expanduser()) if text.startswith("~") else text


@contextmanager
def refused_in_a_line() -> Iterator[None]:
    """What is refused in here ends the script as a wrong argument does: settings that only the ranks can judge."""
    try:
        yield
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error
