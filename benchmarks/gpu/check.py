"""Everything that one GPU can show, in one command and under nine minutes: tests, then measurements, then a report.

    scripts/gpu-check                             gpu-report.md and gpu-report.json, in this folder or --out's
    scripts/gpu-check --only tests staged nccl    some parts
    scripts/gpu-check --cpu                       a rehearsal: the same code on a CPU at tiny sizes

Every part is a process with a budget, and none stops the others: what fails, what a part had no time for, and parts
that did not begin are named in the report. The exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from machine import clocks, facts
from report import as_json, markdown

ROOT = Path(__file__).resolve().parents[2]
MEASURE = str(Path(__file__).with_name("measure.py"))
GRACE = 5.0  # seconds that a part gets to end once its budget is spent
LAST = 8.0  # for the report


@dataclass(frozen=True)
class Part:
    """
    budget    seconds of a run on a GPU
    tests     files of tests/gpu; or
    measured  a part of measure.py
    workers   processes that tests share
    """

    name: str
    budget: float
    tests: tuple[str, ...] = ()
    measured: str = ""
    workers: int = 1
    settings: dict[str, str] = field(default_factory=dict)

    def command(self, options: argparse.Namespace, budget: float, out: Path) -> list[str]:
        if self.measured:
            tiny = ["--tiny"] if options.cpu else []
            seconds = f"{max(budget - 10, 1):.0f}"
            return [sys.executable, MEASURE, self.measured, *tiny, "--seconds", seconds, "--out", str(out)]
        shared = ["-n", str(self.workers)] if self.workers > 1 and find_spec("xdist") and not options.cpu else []
        files = [f"tests/gpu/{name}.py" for name in self.tests]
        return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *shared, *files]


# The dearest tests first, so that their budgets hold; measurements with nothing beside them.
PARTS = (
    Part("tests", 110, ("test_gpu_kernels", "test_gpu_plugins"), workers=8),
    Part("nccl", 30, ("test_gpu_nccl",), workers=4),
    Part("staged", 75, ("test_gpu_staged",), workers=4, settings={"SHARDWRIGHT_GPU_SECONDS": "45"}),
    Part("ceilings", 18, measured="ceilings"),
    Part("llama", 70, measured="llama"),
    Part("optimizer", 25, measured="optimizer"),
    Part("moe", 40, measured="moe"),
    Part("llama compiled", 55, measured="llama_compiled"),
    Part("levers", 60, measured="levers"),
    Part("encoders", 50, measured="encoders"),
    Part("shard of 70B", 30, measured="shard"),
    Part("operators", 25, measured="operators"),
)


def run(part: Part, options: argparse.Namespace, budget: float, folder: Path) -> dict[str, Any]:
    """A part within its budget; what it did, whatever became of it."""
    out = folder / f"{part.name.replace(' ', '-')}.jsonl"
    command, begin = part.command(options, budget, out), time.monotonic()
    environment = {
        **os.environ,
        **part.settings,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "SHARDWRIGHT_GPU_RESULTS": str(out),
        "SHARDWRIGHT_GPU_REHEARSAL": "1" if options.cpu else "0",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / f"{out.stem}.log"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(budget)
        except subprocess.TimeoutExpired:
            status = None
            end(process)
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    tail = log.read_text(errors="replace")[-4000:]
    found: dict[str, Any] = {
        "name": part.name,
        "command": " ".join(["python", *(each.removeprefix(f"{ROOT}/") for each in command[1:])]),
        "budget": budget,
        "seconds": time.monotonic() - begin,
        "tail": tail,
    }
    if part.measured:
        found["figures"] = rows
        bad = any("error" in row for row in rows)
        found["outcome"] = (
            "stopped at its budget" if status is None else "ended well" if status == 0 and not bad else "failed"
        )
        return found
    tests = {row["name"]: row for row in rows if "outcome" in row}
    collected = {name for row in rows for name in row.get("collected", [])}
    found |= {"tests": list(tests.values()), "not_run": sorted(collected - tests.keys())}
    found["outcome"] = "stopped at its budget" if status is None else "ended well" if status == 0 else "failed"
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started, which is its own session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(GRACE)
            if number == signal.SIGTERM:
                continue
        except subprocess.TimeoutExpired:
            continue


def not_run(part: Part) -> dict[str, Any]:
    return {
        "name": part.name,
        "command": "",
        "budget": part.budget,
        "seconds": 0.0,
        "tail": "",
        "outcome": "**not run: no time was left**",
        "not_run": [f"{part.name}, all of it"],
    }


def write(report: dict[str, Any], folder: Path) -> None:
    (folder / "gpu-report.json").write_text(as_json(report))
    (folder / "gpu-report.md").write_text(markdown(report))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="a rehearsal on the CPU, at tiny sizes")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="PART", help="parts to run")
    parser.add_argument("--seconds", type=float, help="for everything; left out: 525, for a rehearsal 3600")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the report")
    options = parser.parse_args(argv)
    if not options.cpu and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no CUDA device on this machine; --cpu rehearses everything on the CPU, at "
            "tiny sizes that say nothing about speed"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    total = options.seconds or (3600.0 if options.cpu else 525.0)
    begin = time.monotonic()
    report: dict[str, Any] = {
        "begun": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "rehearsed": options.cpu,
        "machine": facts(),
        "seconds": 0.0,
        "parts": [],
    }
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    with tempfile.TemporaryDirectory(prefix="shardwright-gpu-") as folder:
        for part in parts:
            left = total - LAST - (time.monotonic() - begin)
            budget = min(left, 8 * part.budget if options.cpu else part.budget)
            done = not_run(part) if left < 15 else run(part, options, budget, Path(folder))
            done["clocks"] = clocks()
            report["parts"].append(done)
            report["seconds"] = time.monotonic() - begin
            write(report, options.out)  # what there is, should this process be ended
            print(f"{part.name}: {done['outcome']}, {done['seconds']:.0f} s", flush=True)
    print(f"report: {options.out / 'gpu-report.md'}")
    return int(any(part["outcome"] != "ended well" for part in report["parts"]))


if __name__ == "__main__":
    sys.exit(main())
