"""Run cells, print a line for each as it goes, keep them in a file."""

from __future__ import annotations

import argparse
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from shardwright.models.verified import line_of, load
from shardwright.testing.matrix import AXES, Axis, pick_axes, run_cells
from tests.models.matrix.data import is_one_step, write_data
from tests.models.matrix.page import PAGE, page
from tests.models.matrix.rows import FAMILIES, KINDS, MAPPINGS, Row, family_rows, sweep_rows

OTHERS = ("tp2", "pp2")  # axes of classes that do not stand for a family


def main() -> None:
    options = _parser().parse_args()
    known = _read(options.json, options.again)
    results = list(known.values())
    if options.write:
        if results:
            write_data(results)
        PAGE.write_text(page(load()))
        return
    work = []
    for row, axes in _chosen(options):
        missing = [axis for axis in axes if (row.subject.model_class, axis.name) not in known]
        if missing:
            work.append((row, missing))
    told = threading.Lock()

    def run(row: Row, axes: list[Axis]) -> None:
        for result in run_cells(row.subject, axes, options.timeout):
            result |= {"family": row.family, "model_type": row.model_type, "first": row.first}
            with told:
                results.append(result)
                _tell(result, options)

    jobs = 1 if options.times else options.jobs
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(run, row, axes) for row, axes in work]:
            done.result()
    print(summary(results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.models.matrix", description=__doc__)
    parser.add_argument("--family", action="append", help="a family, or a part of its name; all when none is given")
    parser.add_argument("--model", action="append", help="a class of the chosen families, or of the sweep")
    parser.add_argument("--axis", action="append", help=f"one of {', '.join(AXES)}, or tp, pp, sp, all")
    parser.add_argument("--first", action="store_true", help="only the class that stands for a family")
    parser.add_argument("--times", action="store_true", help="only how long steps take, of classes that stand for one")
    parser.add_argument("--sweep", action="store_true", help="all classes of transformers' auto mappings, by tp2, pp2")
    parser.add_argument("--mapping", action="append", help=f"of the sweep: {', '.join((*KINDS, *MAPPINGS))}")
    parser.add_argument("--json", type=Path, help="one line per cell; cells that it holds are not run again")
    parser.add_argument(
        "--again", action="append", default=[], help='outcomes in --json that are run again; "one step" for such cells'
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds of one cell")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--jobs", type=_positive, default=max(1, cores // 2), help="classes side by side")
    parser.add_argument(
        "--write",
        action="store_true",
        help="run nothing: put the cells of --json into the package's data, and write docs/models.md of it",
    )
    parser.add_argument("--trace", action="store_true", help="show where a cell failed")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: at least 1")
    return number


def _tell(result: dict[str, Any], options: argparse.Namespace) -> None:
    trace = result.pop("trace", "")
    print(f"{result['model_class']:36} {line_of(result)}"[:400], flush=True)
    if options.trace and trace:
        print(trace, flush=True)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(result) + "\n")


def _read(path: Path | None, again: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Cells of a file by class and axis; the last line of a cell counts."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    cells = {(one["model_class"], one["axis"]): one for one in lines}
    asked = {word.replace("-", " ") for word in again}

    def stays(cell: dict[str, Any]) -> bool:
        return cell["outcome"] not in asked and not ("one step" in asked and is_one_step(cell))

    return {key: one for key, one in cells.items() if stays(one)}


def _chosen(options: argparse.Namespace) -> Iterator[tuple[Row, list[Axis]]]:
    asked = pick_axes(options.axis) if options.axis else None
    for row in _rows(options):
        if options.model and row.subject.model_class not in options.model:
            continue
        if (options.first or options.times) and not row.first:
            continue
        if options.times:
            asked = [AXES["times"]]
        yield row, asked or (pick_axes(["all"]) if row.first else pick_axes(OTHERS))


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    if options.sweep:
        yield from sweep_rows(options.mapping or ())
        return
    words = [word.lower() for word in options.family or [""]]
    exact = [name for name in FAMILIES if name.lower() in words]
    chosen = exact or [name for name in FAMILIES if any(word in name.lower() for word in words)]
    if not chosen:
        raise SystemExit(f"--family {options.family}: no family's name has it; families are {', '.join(FAMILIES)}")
    for family in chosen:
        yield from family_rows(family)


def summary(results: list[dict[str, Any]]) -> str:
    """Outcomes by axis, then what did not come out well by cause."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    causes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for cell in results:
        counts[cell["axis"]][cell["outcome"]] += 1
        if cell["outcome"] not in ("verified", "not applicable", "timed"):
            causes[cell["outcome"], cell["axis"], cell.get("why", "")[:90]].append(cell["model_class"])
    lines = [f"{axis:12} " + ", ".join(f"{count} {word}" for word, count in counts[axis].items()) for axis in counts]
    for (outcome, axis, why), names in sorted(causes.items()):
        lines.append(f"{outcome} {axis}: {why}\n    {', '.join(names)}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
