"""What is known of models on layouts, from runs that were compared with one process. Needs no torch.

`verified.json` is written by `python -m tests.models.matrix --write`:

    {"transformers": version, "torch": version, "dates": ...,
     "axes": {name: {"title": ..., "group": ...}}, "groups": {name: title}, "one_step": number of cells,
     "reasons": [text, ...],
     "rows": [{"family", "model_type", "model_class", "first", "kinds", "cells": {axis: [outcome, reason number or -1]},
               "share", "whole", "times"}]}
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("verified.json")
OUTCOMES = ("verified", "refused", "wrong", "failed", "not applicable", "not built")


@dataclass(frozen=True)
class Cell:
    outcome: str
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One class.

    family  of models, or the mapping of transformers' auto classes that has it
    first   whether it stands for its model type, and was run on every axis
    share   of the parameters that two tensor-parallel ranks share, `whole` the larger ones that they do not
    kinds   of transformers' auto mappings that have it: "causal LM", "image", ...
    times   "one", "tp2", "pp2" -> milliseconds of a step, of CPU and elapsed
    """

    family: str
    model_type: str
    model_class: str
    first: bool
    cells: Mapping[str, Cell]
    share: float | None = None
    whole: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    times: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verified:
    """All results and with which versions they were found.

    axes        (name, title, group)
    one_step    how many verified cells that train did so for one step only, at most
    """

    versions: Mapping[str, str]
    axes: tuple[tuple[str, str, str], ...]
    groups: Mapping[str, str]
    rows: tuple[Row, ...] = field(default=())
    one_step: int = 0

    def matching(self, *texts: str) -> list[Row]:
        """Rows whose family, model type or class has each of the texts in it, in letters of any case: "GPT-2" is gpt2,
        and "qwen3 moe" qwen3_moe.
        """
        wanted = [_plain(text) for text in texts]
        return [row for row in self.rows if all(any(one in _plain(name) for name in _names(row)) for one in wanted)]

    def nearest(self, text: str, most: int = 5) -> list[str]:
        """Model types and families whose names are the closest to a text that none has."""
        known = {_plain(name): name for row in reversed(self.rows) for name in _names(row)}
        known |= {_plain(row.model_type): row.model_type for row in self.rows}
        found = difflib.get_close_matches(_plain(text), known, n=most, cutoff=0.5)
        return list(dict.fromkeys(known[name] for name in found))


def _names(row: Row) -> tuple[str, ...]:
    return row.family, row.model_type, row.model_class


def _plain(text: str) -> str:
    """Small letters and digits alone."""
    return "".join(letter for letter in text.lower() if letter.isalnum())


def load(file: Path = FILE) -> Verified:
    data = json.loads(file.read_text())
    reasons = data["reasons"]

    def cell(said: list[Any]) -> Cell:
        return Cell(said[0], reasons[said[1]] if said[1] >= 0 else "")

    rows = tuple(
        Row(
            one["family"],
            one["model_type"],
            one["model_class"],
            one["first"],
            {axis: cell(said) for axis, said in one["cells"].items()},
            one.get("share"),
            tuple(one.get("whole", ())),
            tuple(one.get("kinds", ())),
            {name: (cpu, elapsed) for name, (cpu, elapsed) in one.get("times", {}).items()},
        )
        for one in data["rows"]
    )
    axes = tuple((name, one["title"], one["group"]) for name, one in data["axes"].items())
    return Verified(data["versions"], axes, data["groups"], rows, data.get("one_step", 0))


def line_of(cell: Mapping[str, Any]) -> str:
    """One line about a cell that has just been run."""
    share = f"{cell['share']:.0%} sharded" if "share" in cell else ""
    whole = f"whole: {', '.join(cell['whole'])}" if cell.get("whole") else ""
    times = ", ".join(f"{name} {cpu:.1f}" for name, (cpu, _) in cell.get("times", {}).items())
    times = times and f"CPU ms of a step: {times}"
    said = "; ".join(filter(None, (share, whole, times, cell.get("note", ""), cell.get("why", ""))))
    return f"{cell['axis']:13} {cell['outcome']:14} {cell['seconds']:6.1f} s  {said}".rstrip()


def as_json(rows: list[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        shared: dict[str, Any] = {} if row.share is None else {"share": row.share, "whole": list(row.whole)}
        if row.times:
            shared["step_milliseconds"] = {
                name: {"cpu": cpu, "elapsed": wall} for name, (cpu, wall) in row.times.items()
            }
        yield {
            "family": row.family,
            "model_type": row.model_type,
            "model_class": row.model_class,
            **shared,
            "axes": {
                name: {"outcome": cell.outcome, **({"why": cell.why} if cell.why else {})}
                for name, cell in row.cells.items()
            },
        }
