"""Everything that one GPU can show, in one command and under nine minutes: tests, then measurements, then a report.

    scripts/gpu-check                             gpu-report.md and gpu-report.json, in this folder or --out's
    scripts/gpu-check --only tests staged nccl    some parts
    scripts/gpu-check --cpu                       a rehearsal: the same code on a CPU at tiny sizes

Every part is a process with a budget, and none stops the others: one that takes longer is ended, with all that it has
started. Budgets add up to less than the limit, and what a part leaves of its own the next ones may use. What fails,
what a part had no time for, and parts that did not begin are named in the report, also where this process is ended. The
exit status is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
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
GRACE = 3.0  # seconds that a part gets to end once its budget is spent
LAST = 8.0  # for the report
TOTAL = 525.0  # for everything, of nine minutes
REHEARSAL = 7.0  # times the budget on a CPU
LEAST = 8.0  # seconds, in which no part comes to anything
ENDED_WELL = "ended well"
ENDED_EARLY = "this run was ended before"
MARK = "SHARDWRIGHT_GPU_PART"  # in the environment of all that a part starts


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


# Steps that take most of a device's memory must not fail for want of a piece that is large enough.
WHOLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# The dearest tests first, so that their budgets hold; measurements with nothing beside them.
PARTS = (
    Part("tests", 75, ("test_gpu_kernels", "test_gpu_plugins"), workers=12),
    Part("nccl", 30, ("test_gpu_nccl",), workers=4),
    Part("staged", 65, ("test_gpu_staged",), workers=4, settings={"SHARDWRIGHT_GPU_SECONDS": "40"}),
    Part("ceilings", 13, measured="ceilings"),
    Part("llama", 64, measured="llama", settings=WHOLE),
    Part("optimizer", 18, measured="optimizer"),
    Part("moe", 34, measured="moe"),
    Part("llama compiled", 43, measured="llama_compiled", settings=WHOLE),
    Part("levers", 45, measured="levers", settings=WHOLE),
    Part("encoders", 56, measured="encoders"),
    Part("shard of 70B", 19, measured="shard"),
    Part("operators", 17, measured="operators"),
)


def shares(parts: Sequence[Part], total: float, times: float) -> list[float]:
    """Seconds of each part: its budget, `times` as long, or less where all of them would not fit into `total`."""
    room = total - LAST - GRACE * len(parts)
    wanted = times * sum(part.budget for part in parts)
    return [times * part.budget * min(1.0, room / wanted) for part in parts]


def run(part: Part, options: argparse.Namespace, budget: float, folder: Path) -> dict[str, Any]:
    """A part within its budget; what it did, whatever became of it."""
    out = folder / f"{part.name.replace(' ', '-')}.jsonl"
    command, begin = part.command(options, budget, out), time.monotonic()
    environment = {
        **os.environ,
        **part.settings,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "SHARDWRIGHT_GPU_RESULTS": str(out),
        MARK: str(out),
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
        finally:  # also where this process is interrupted
            end(process)
            end_others(str(out))
    rows, unread = read(out)
    tail = log.read_text(errors="replace")[-4000:]
    found: dict[str, Any] = {
        "name": part.name,
        "command": " ".join(
            [*(f"{name}={value}" for name, value in part.settings.items()), "python"]
            + [each.removeprefix(f"{ROOT}/") for each in command[1:]]
        ),
        "budget": budget,
        "seconds": time.monotonic() - begin,
        "tail": tail,
    }
    wrong = [f"exit status {status}"] if status else []
    wrong += [f"{unread} lines of its results cannot be read"] if unread else []
    if part.measured:
        found["figures"] = rows
        bad = sum("error" in row for row in rows)
        wrong += [f"{bad} figures failed"] if bad else []
        wrong += ["it took no figure"] if not rows else []
    else:
        # setting up, running and clearing away may each have failed
        tests: dict[str, dict[str, Any]] = {}
        for row in rows:
            has_failed = tests.get(row.get("name"), {}).get("outcome") == "failed"
            if "outcome" in row and not has_failed:
                tests[row["name"]] = row
        collected = {name for row in rows for name in row.get("collected", [])}
        found |= {"tests": list(tests.values()), "not_run": sorted(collected - tests.keys())}
        bad = sum(test["outcome"] == "failed" for test in tests.values())
        wrong += [f"{bad} tests failed"] if bad else []
        wrong += [f"{len(found['not_run'])} tests were not run"] if found["not_run"] else []
        wrong += ["it ran no test"] if not tests else []
    found["status"] = status
    found["outcome"] = "**stopped at its budget**" if status is None else ENDED_WELL
    if wrong and status is not None:
        found["outcome"] = f"**failed** ({', '.join(wrong)})"
    return found


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Lines of results, and how many cannot be read, as the last one where a process was ended while it wrote it."""
    rows, unread = [], 0
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            unread += 1
    return rows, unread


def end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except (ProcessLookupError, PermissionError):  # nobody is left, or none but the dead
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    process.wait()


def end_others(mark: str) -> None:
    """What a part has started in sessions of their own: they would sit on the device beside the next part."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # gone, or somebody else's
            continue


def not_run(part: Part, budget: float, why: str) -> dict[str, Any]:
    return {
        "name": part.name,
        "command": "",
        "budget": budget,
        "seconds": 0.0,
        "tail": "",
        "status": None,
        "outcome": f"**not run: {why}**",
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
    parser.add_argument("--seconds", type=float, help=f"for everything; left out: {TOTAL:.0f}, for a rehearsal 3600")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the report")
    options = parser.parse_args(argv)
    if not options.cpu and not torch.cuda.is_available():
        parser.error(
            f"torch {torch.__version__} sees no CUDA device on this machine; --cpu rehearses everything on the CPU, at "
            "tiny sizes that say nothing about speed"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    total = options.seconds or (3600.0 if options.cpu else TOTAL)
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of what is to be cleared away
    report: dict[str, Any] = {
        "begun": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "rehearsed": options.cpu,
        "machine": facts(),
        "seconds": 0.0,
        "parts": [],
    }
    parts = [part for part in PARTS if options.only is None or part.name in options.only]
    budgets = shares(parts, total, REHEARSAL if options.cpu else 1.0)
    report["parts"] = [not_run(part, budget, ENDED_EARLY) for part, budget in zip(parts, budgets, strict=True)]
    write(report, options.out)  # what there is, should this process be ended
    with tempfile.TemporaryDirectory(prefix="shardwright-gpu-") as folder:
        for number, part in enumerate(parts):
            later = sum(budgets[number + 1 :]) + GRACE * (len(parts) - number)
            left = total - LAST - (time.monotonic() - begin) - later
            budget = min(left, 2 * budgets[number])
            if budget < LEAST:
                done = not_run(part, budgets[number], "no time was left")
            else:
                done = run_or_say_why(part, options, budget, Path(folder))
            done["clocks"] = clocks()
            report["parts"][number] = done
            report["seconds"] = time.monotonic() - begin
            write(report, options.out)
            print(f"{part.name}: {done['outcome']}, {done['seconds']:.0f} s", flush=True)
    print(f"report: {options.out / 'gpu-report.md'}")
    return int(any(part["outcome"] != ENDED_WELL for part in report["parts"]))


def run_or_say_why(part: Part, options: argparse.Namespace, budget: float, folder: Path) -> dict[str, Any]:
    """What goes wrong here, and not in the part, stops no other part either."""
    try:
        return run(part, options, budget, folder)
    except Exception as error:
        return not_run(part, budget, f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
