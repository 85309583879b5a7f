"""The table of mistakes: what a user does wrong, and what the user gets.

A case is a function `(rank, world) -> None` under `@mistake`, in a file of this folder named after its area. It makes
the mistake and asserts what the docs promise: the numbers of one process, or a refusal on every rank.

    @mistake(
        symptom="model.save_pretrained(path) after boost",
        gets="the whole model in the directory, whatever the layout",
        fix="nothing to do; booster.save_model says more about files",
    )
    def save_pretrained(rank, world): ...

    @mistake(symptom=..., gets=..., fix=..., worlds=(2, 4), alone=True)     leaves rank processes unusable: gets some of
                                                                            its own

Cases of one area run one after another in the same rank processes, on every number of ranks in `worlds`, so a case must
leave all ranks at the same point: a refusal is asserted with `refused`, which every rank enters.
docs/troubleshooting.md is written from these texts.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

WORLDS = (1, 2, 4)
_NOT_AREAS = {"__init__", "table", "write_docs"}


@dataclass(frozen=True)
class Mistake:
    """One row. `symptom` is what the user does or sees, `gets` what happens then, `fix` what to do about it."""

    area: str
    name: str
    symptom: str
    gets: str
    fix: str
    worlds: tuple[int, ...]
    alone: bool
    timeout: float
    run: Callable[[int, int], None]

    def __reduce__(self) -> tuple[Callable[..., Mistake], tuple[str, str]]:
        return find, (self.area, self.name)  # rank processes look it up: its function is decorated


_table: dict[tuple[str, str], Mistake] = {}


def mistake(
    *, symptom: str, gets: str, fix: str, worlds: tuple[int, ...] = WORLDS, alone: bool = False, timeout: float = 30
) -> Callable[[Callable[[int, int], None]], Callable[[int, int], None]]:
    """Enter a function into the table. `timeout` is that of a case that runs alone, in seconds."""

    def enter(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
        area = function.__module__.rpartition(".")[2]
        row = Mistake(area, function.__name__, symptom, gets, fix, worlds, alone, timeout, function)
        assert (area, row.name) not in _table, f"two mistakes are called {row.name}"
        _table[area, row.name] = row
        return function

    return enter


def areas() -> list[str]:
    return sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if path.stem not in _NOT_AREAS and not path.stem.startswith("test_")
    )


def load(area: str) -> list[Mistake]:
    """The rows of one area, in the order of its file."""
    importlib.import_module(f"tests.mistakes.{area}")
    return [row for (home, _), row in _table.items() if home == area]


def find(area: str, name: str) -> Mistake:
    load(area)
    return _table[area, name]


@contextmanager
def refused(*parts: str, by: type[Exception] | tuple[type[Exception], ...] = ValueError) -> Iterator[None]:
    """The block raises `by` on this rank, in a message that has all `parts` (regular expressions) and no raw torch
    error.
    """
    try:
        yield
    except by as error:
        text = str(error)
        for part in parts:
            assert re.search(part, text), f"{part!r} is not in the message:\n{text}"
        return
    raise AssertionError(f"nothing was refused; expected {by} with {parts}")
