"""Cells of one subject on rank processes, many of them in one world; each is given as soon as it is known.

Ranks tell what they found by files, so that a rank which fails, hangs or dies takes only its own cell with it: the
world ends, and another one goes on with the next cell.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..rank_report import RankError
from ..ranks import run_ranks
from .axes import AXES, Axis
from .cell import Result, is_refusal, run_cell
from .subject import Built, NotBuilt, Subject, build

SECONDS = 60.0  # of one cell
_BUILD_SECONDS = 60.0
_OTHERS = 5.0  # how long a rank that was refused waits for the others to be refused too
_BAD = ("failed", "wrong", "refused")
_LONGEST = 600  # characters of a reason


def run_cells(subject: Subject, axes: Sequence[Axis], seconds: float = SECONDS) -> Iterator[Result]:
    """A dict for every axis, worlds of equal size together: model_class, axis, outcome, seconds, and what belongs to
    the outcome (why, share, whole, note, steps, times, trace).
    """
    for world, timed in sorted({(axis.world, axis.kind == "times") for axis in axes}):
        waiting = [axis.name for axis in axes if (axis.world, axis.kind == "times") == (world, timed)]
        while waiting:
            for result in _run_world(subject, waiting, world, seconds, timed):
                waiting.remove(result["axis"])
                yield {"model_class": subject.model_class, **result}


def _run_world(subject: Subject, names: list[str], world: int, seconds: float, timed: bool) -> Iterator[Result]:
    """Results of the first cells, up to one that ended the world; at least one."""
    names = list(names)
    with tempfile.TemporaryDirectory(prefix="shardwright-cells-") as folder:
        ended: list[RankError | None] = []
        patience = float(os.environ.get("SHARDWRIGHT_PATIENCE", "1"))

        def work() -> None:
            limit = _BUILD_SECONDS + (seconds + 5) * len(names)
            debug = "OFF" if timed else None  # torch's checks take as long as what they check
            try:
                run_ranks(_work, world, subject, names, folder, seconds * patience, timeout=limit, debug=debug)
                ended.append(None)
            except RankError as error:
                ended.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        told = 0
        while told < len(names):
            alive = thread.is_alive()
            said = _read(Path(folder), names[told], world)
            if None not in said:
                told += 1
                yield _judged(names[told - 1], [one for one in said if one is not None])
            elif alive:
                time.sleep(0.02)
            else:
                break
        thread.join()
        if told == len(names):
            return
        partly = [one for one in _read(Path(folder), names[told], world) if one is not None]
        if partly or not told:  # else it has not begun, and has its turn in the next world
            error = ended[0] if ended else None
            unsaid: Result = {"outcome": "failed", "why": _first_error(error), "trace": str(error)[-3000:]}
            yield _judged(names[told], partly or [unsaid])


def _judged(name: str, said: list[Result]) -> Result:
    """What all ranks together say: the first that has come to grief takes the others with it."""
    bad = [one for one in said if one["outcome"] in _BAD]
    chosen = min(bad, key=lambda one: one.get("at", 0.0)) if bad else said[0]
    found: Result = {"axis": name, "seconds": 0.0, **chosen}
    found.pop("at", None)
    return found | {"why": " ".join(found.get("why", "").split())[:_LONGEST]}


def _first_error(error: RankError | None) -> str:
    lines = [line for line in str(error).splitlines() if "Error" in line]
    return lines[-1] if lines else str(error)[:200]


def _read(folder: Path, name: str, world: int) -> list[Result | None]:
    found: list[Result | None] = []
    for rank in range(world):
        path = folder / f"{name}.{rank}.json"
        found.append(json.loads(path.read_text()) if path.exists() else None)
    return found


# --- on ranks ---


def _work(rank: int, world: int, subject: Subject, names: list[str], folder: str, seconds: float) -> None:
    logging.disable(logging.WARNING)
    importlib.import_module("transformers").logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    told = _Told(Path(folder), rank, world)
    try:
        built = build(subject)
    except NotBuilt as error:
        for name in names:
            told.say(name, {"outcome": "not built", "why": str(error), "seconds": 0.0})
        return
    for name in names:
        _one(told, built, AXES[name], seconds)


def _one(told: _Told, built: Built, axis: Axis, seconds: float) -> None:
    late = threading.Timer(seconds, told.give_up, (axis.name, seconds))
    late.daemon = True
    late.start()
    started = time.monotonic()

    def spent() -> dict[str, float]:
        return {"seconds": round(time.monotonic() - started, 2)}

    try:
        result = run_cell(built, axis)
    except Exception as error:
        late.cancel()
        refused = is_refusal(error)
        text = str(error) if refused else f"{type(error).__name__}: {error}"
        trace = {} if refused else {"trace": traceback.format_exc()[-3000:]}
        told.say(axis.name, {"outcome": "refused" if refused else "failed", "why": text, **spent(), **trace})
        if not (refused and told.all_refused(axis.name)):
            raise
        return
    late.cancel()
    told.say(axis.name, {**result, **spent()})


class _Told:
    """What this rank found, for the process that started it and for the other ranks."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world

    def say(self, name: str, result: dict[str, Any]) -> None:
        path = self.folder / f"{name}.{self.rank}.json"
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({**result, "at": time.time()}))
        draft.rename(path)

    def all_refused(self, name: str) -> bool:
        end = time.monotonic() + _OTHERS
        while time.monotonic() < end:
            said = _read(self.folder, name, self.world)
            if None not in said:
                return all(one is not None and one["outcome"] == "refused" for one in said)
            time.sleep(0.01)
        return False

    def give_up(self, name: str, seconds: float) -> None:
        self.say(name, {"outcome": "failed", "why": f"no result within {seconds:.0f} s", "seconds": seconds})
        os._exit(1)
