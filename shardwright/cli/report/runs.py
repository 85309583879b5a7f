"""What a run has left: metrics.jsonl, run.json, recipe.yaml and timeline.json. Only the first is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...pipeline.snapshots import read_timelines
from ...pipeline.timeline import Timeline
from ...utils.errors import counted, nearest

METRICS = "metrics.jsonl"
_EVALUATION = "eval_loss"
_LARGEST = 1e300  # that can be drawn beside its negative


@dataclass
class Run:
    """
    name, folder   what it is called, and where it is
    steps          one row of numbers per step
    evaluations    one row per evaluation, with `eval_loss`
    told           run.json: tables of facts by title, `floor` (the least loss there can be), `texts` by title
    settings       dotted key -> value, of the recipe and the layout
    timelines      of the pipeline, by schedule
    notes          what is odd about the files
    """

    name: str
    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    timelines: dict[str, Timeline] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def column(self, name: str) -> list[float | None]:
        """A number of every step; None where it is not finite or not there."""
        return [_finite(row.get(name)) for row in self.steps]

    def seconds(self) -> list[float]:
        """Time in steps until behind each of them."""
        total, found = 0.0, []
        for row in self.steps:
            total += _finite(row.get("step_time")) or 0.0
            found.append(total)
        return found


def read_run(path: Path) -> Run:
    """The run of a directory, or of its metrics.jsonl; ValueError where there is none."""
    folder = path.parent if path.is_file() else path
    metrics = path if path.is_file() else folder / METRICS
    if not metrics.is_file():
        raise ValueError(_no_run(path))
    run = Run(folder.resolve().name, folder)
    unread = again = 0
    for row in _rows(metrics):
        if row is None:
            unread += 1
        elif _EVALUATION in row:
            run.evaluations.append(row)
        else:
            while run.steps and run.steps[-1]["step"] >= row["step"]:  # it went on from a checkpoint before them
                run.steps.pop()
                again += 1
            while run.evaluations and run.evaluations[-1]["step"] >= row["step"]:  # of weights that are no more
                run.evaluations.pop()
            run.steps.append(row)
    if not run.steps:
        raise ValueError(f"{metrics} has no step; there is nothing to draw before the first one is over")
    if unread:
        run.notes.append(f"{unread} of the lines of {METRICS} could not be read: half written, or not of a run")
    if again:
        run.notes.append(
            f"{counted(again, 'step')} {'was' if again == 1 else 'were'} trained again later, which are the ones that "
            "count"
        )
    for what, of, rows, key in (
        ("loss", "step", run.steps, "loss"),
        ("held-out loss", "evaluation", run.evaluations, _EVALUATION),
    ):
        if strange := [row["step"] for row in rows if _finite(row.get(key)) is None]:
            run.notes.append(
                f"the {what} of {counted(len(strange), of)} is no finite number, at step {strange[0]} first"
            )
    run.told = _told(_mapping(folder / "run.json", run.notes), run.notes)
    recipe = _mapping(folder / "recipe.yaml", run.notes)
    run.settings = dict(_flat(recipe)) | dict(_flat(run.told.get("layout", {}), "layout."))
    if (folder / "timeline.json").is_file():
        try:
            run.timelines = read_timelines(folder / "timeline.json")
        except ValueError:
            run.notes.append("timeline.json could not be read")
    return run


def _told(given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """run.json without what is not of its kind."""
    kinds = {
        "facts": _is_mapping,
        "layout": _is_mapping,
        "finished": _is_mapping,
        "made with": _is_mapping,
        "tables": lambda value: _is_mapping(value) and all(_is_mapping(rows) for rows in value.values()),
        "texts": lambda value: (
            _is_mapping(value) and all(isinstance(line, str) for lines in value.values() for line in lines)
        ),
        "floor": lambda value: _finite(value) is not None,
    }
    odd = [key for key, fits in kinds.items() if key in given and not fits(given[key])]
    if odd:
        notes.append(f"run.json is not read where it says {', '.join(odd)}")
    return {key: value for key, value in given.items() if key not in odd}


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _no_run(path: Path) -> str:
    if path.is_dir():
        below = [one.parent.name for one in sorted(path.glob(f"*/{METRICS}"))]
        hint = f"; there is one in {', '.join(below[:5])}" if below else "; it is what shardwright train leaves"
        return f"{path} has no {METRICS}{hint}"
    around = path.parent.iterdir() if path.parent.is_dir() else []
    return f"{path}: there is no such directory{nearest(path.name, [one.name for one in around])}"


def _rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a file of lines; None for what is no step of a run."""
    for line in path.read_text(errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        good = isinstance(row, dict) and _finite(row.get("step")) is not None
        yield row if good and ("loss" in row or _EVALUATION in row) else None


def _mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name} could not be read")
    return {}


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in given.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _finite(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST
    return float(value) if good else None
