"""Pieces of error messages: what a value should have been."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(value: object, known: Iterable[str]) -> str:
    """` - did you mean 'x'?` for the known name closest to `value`, or an empty string."""
    matches = difflib.get_close_matches(str(value), list(known), n=1, cutoff=0.5)
    return f" - did you mean {matches[0]!r}?" if matches else ""


def one_of(field: str, value: object, known: Sequence[str]) -> ValueError:
    """The error for a value outside a closed list."""
    listed = ", ".join(repr(name) for name in known)
    return ValueError(f"{field}={value!r} is not one of {listed}{nearest(value, known)}")


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 rank`, `2 ranks`: a number and what it counts; `plural` where that is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
