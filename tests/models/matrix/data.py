"""Results of cells as the package's data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from shardwright.models.verified import FILE, Row, load
from shardwright.testing.matrix.axes import AXES, GROUPS
from tests.models.matrix.rows import kinds_of

_LONGEST = 400  # characters of a reason
_TRAINING = ("train", "lazy", "lora", "xformers")


def write_data(results: Iterable[dict[str, Any]], file: Path = FILE) -> None:
    """One line per class, so that a change of one cell is a change of one line. What the file holds of other cells
    stays.
    """
    results = list(results)
    rows: dict[str, dict[str, Any]] = {}
    reasons: dict[str, int] = {}
    one_step = 0

    def number_of(why: str) -> int:
        return reasons.setdefault(why, len(reasons)) if why else -1

    if file.exists():
        before = load(file)
        again = {(cell["model_class"], cell["axis"]) for cell in results}
        # which of the cells of before these are is not kept: at most as many as are left of them
        one_step = min(before.one_step, sum(_may_be_one_step(row, again) for row in before.rows))
        rows = {row.model_class: _as_data(row, number_of) for row in before.rows}
    for cell in results:
        name = cell["model_class"]
        row = rows.setdefault(name, {"model_class": name, "first": False, "kinds": kinds_of(name), "cells": {}})
        if cell["first"] or "family" not in row:  # a family rather than a mapping
            row |= {key: cell[key] for key in ("family", "model_type", "first")}
        if cell["outcome"] == "timed":
            row["times"] = cell["times"]
            continue
        why = _plain(cell.get("why", "") or cell.get("note", ""), name)
        row["cells"][cell["axis"]] = [cell["outcome"], number_of(why)]
        one_step += is_one_step(cell)
        if "share" in cell:
            row |= {"share": cell["share"], "whole": cell["whole"]}
    for row in rows.values():
        row["cells"] = {axis: row["cells"][axis] for axis in AXES if axis in row["cells"]}
    head = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]},
        "axes": {axis.name: {"title": axis.title, "group": axis.group} for axis in AXES.values() if axis.group},
        "groups": GROUPS,
        "one_step": one_step,
        "reasons": list(reasons),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    listed = ",\n".join(json.dumps(row) for row in rows.values())
    file.write_text("{" + ",\n".join(lines) + ',\n"rows": [\n' + listed + "\n]}\n")


def _as_data(row: Row, number_of: Callable[[str], int]) -> dict[str, Any]:
    known: dict[str, Any] = {"family": row.family, "model_type": row.model_type, "model_class": row.model_class}
    known |= {"first": row.first, "kinds": list(row.kinds)}
    known["cells"] = {axis: [cell.outcome, number_of(cell.why)] for axis, cell in row.cells.items()}
    if row.share is not None:
        known |= {"share": row.share, "whole": list(row.whole)}
    return known | ({"times": {name: list(times) for name, times in row.times.items()}} if row.times else {})


def _may_be_one_step(row: Row, again: set[tuple[str, str]]) -> int:
    """Cells that are not among those that were run again."""
    cells = [{"axis": axis, "outcome": cell.outcome} for axis, cell in row.cells.items()]
    return sum(is_one_step(cell) for cell in cells if (row.model_class, cell["axis"]) not in again)


def is_one_step(cell: dict[str, Any]) -> bool:
    """Whether it was trained, for one step: lines of before there were two."""
    axis = AXES.get(cell["axis"])
    trained = axis is not None and axis.kind in _TRAINING
    return trained and cell["outcome"] == "verified" and cell.get("steps", 1) == 1


def _plain(why: str, name: str) -> str:
    """Without what differs from one class or one run to the next."""
    return " ".join(why.replace(name, "the model").split())[:_LONGEST]
