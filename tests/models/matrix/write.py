"""Results of cells as the package's data, and the page docs/models.md from that data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from shardwright.models.verified import FILE, Row, Verified
from shardwright.testing.matrix.axes import AXES, GROUPS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_MARKS = {"verified": "yes", "not applicable": "-", "refused": "no", "wrong": "**wrong**", "failed": "fails"}
_LONGEST = 240  # characters of a reason
ENOUGH = 0.75  # share of the parameters


def write_data(results: Iterable[dict[str, Any]], file: Path = FILE) -> None:
    """One line per class, sorted, so that a change of one cell is a change of one line."""
    rows: dict[str, dict[str, Any]] = {}
    reasons: dict[str, int] = {}
    for cell in results:
        name = cell["model_class"]
        row = rows.setdefault(
            name, {key: cell[key] for key in ("family", "model_type", "model_class", "first")} | {"cells": {}}
        )
        why = _plain(cell.get("why", "") or cell.get("note", ""))
        number = reasons.setdefault(why, len(reasons)) if why else -1
        row["cells"][cell["axis"]] = [cell["outcome"], number]
        if "share" in cell:
            row |= {"share": cell["share"], "whole": cell["whole"]}
    for row in rows.values():
        row["cells"] = {axis: row["cells"][axis] for axis in AXES if axis in row["cells"]}
    head = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]},
        "axes": {axis.name: {"title": axis.title, "group": axis.group} for axis in AXES.values()},
        "groups": GROUPS,
        "reasons": list(reasons),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    listed = ",\n".join(json.dumps(rows[name]) for name in rows)
    file.write_text("{" + ",\n".join(lines) + ',\n"rows": [\n' + listed + "\n]}\n")


def _plain(why: str) -> str:
    """Without what differs from one run to the next."""
    return " ".join(why.split())[:_LONGEST]


def page(found: Verified) -> str:
    """The whole of docs/models.md."""
    notes: dict[str, int] = {}
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    first = [row for row in found.rows if row.first]
    lines = [
        "# Models",
        "",
        f"Written by `python -m tests.models.matrix --write` with {versions}. The results are data of the package:",
        "`shardwright models` prints them, and `shardwright models --check NAME` tries a model on this machine.",
        "",
        "A cell is one class of transformers at a tiny size, run on rank processes (two, or four where two axes meet)",
        "and compared with the same class in one process: the loss, every gradient, every weight after a step, in",
        "float64 to 1e-8 (in the column fp32 in float32 to 1e-5), on samples of different lengths. `yes`: they are",
        "equal; `no` that it is refused with an error, `fails` that it ends in another way, `-` that it makes no",
        "sense for the class. Numbers lead to the reasons below. An empty cell was not run.",
        "",
        f"{_counts(found.rows, 'tp2')} {_shares(found.rows)} {_counts(found.rows, 'pp2')}",
        "",
        "A model that is in no table: [adding a model](adding_a_model.md).",
    ]
    for group, title in found.groups.items():
        axes = [(name, shown) for name, shown, where in found.axes if where == group]
        lines += ["", f"## {title}", "", "| model | class | " + " | ".join(shown for _, shown in axes) + " |"]
        lines.append("|---" * (len(axes) + 2) + "|")
        for row in first:
            cells = [_mark(row, name, notes) for name, _ in axes]
            lines.append(f"| {row.family} | {row.model_class} | " + " | ".join(cells) + " |")
    lines += ["", "## All classes", "", "| model type | class | tp2 | sharded | whole on every rank | pp2 |"]
    lines.append("|---" * 6 + "|")
    for row in sorted(found.rows, key=lambda row: (row.model_type, row.model_class)):
        share = "" if row.share is None else f"{row.share:.0%}"
        whole = ", ".join(f"`{name}`" for name in row.whole)
        cells = f"{_mark(row, 'tp2', notes)} | {share} | {whole} | {_mark(row, 'pp2', notes)}"
        lines.append(f"| {row.model_type} | {row.model_class} | {cells} |")
    lines += ["", "## Reasons", ""]
    lines += [f"{number}. {why.replace('|', '/')}" for why, number in notes.items()]
    return "\n".join(lines).rstrip() + "\n"


def _mark(row: Row, axis: str, notes: dict[str, int]) -> str:
    cell = row.cells.get(axis)
    if cell is None:
        return ""
    mark = _MARKS.get(cell.outcome, cell.outcome)
    if not cell.why or cell.outcome == "not applicable":
        return mark
    return f"{mark} ({notes.setdefault(cell.why, len(notes) + 1)})"


def _counts(rows: Iterable[Row], axis: str) -> str:
    counts = Counter(row.cells[axis].outcome for row in rows if axis in row.cells)
    built = counts.total() - counts["not built"]
    return f"{axis}: {counts['verified']} of {built} classes verified, {counts['not built']} more not built."


def _shares(rows: Iterable[Row]) -> str:
    shares = [row.share for row in rows if row.share is not None and row.cells["tp2"].outcome == "verified"]
    return f"{sum(share >= ENOUGH for share in shares)} have at least {ENOUGH:.0%} of their parameters sharded."
