"""Chrome traces of several ranks as one, with the ranks named and on one clock."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MERGED = "merged.json"
_OWN = "shardwright"  # the key of what is noted in a rank's trace
_NAMES_PER_RANK = 1000


def trace_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.json"


def note_rank(path: Path, rank: int, name: str, ahead: float) -> None:
    """Write into the trace whose it is. ahead: seconds that the rank's clock is ahead of that of rank 0."""
    trace = json.loads(path.read_text())
    trace[_OWN] = {"rank": rank, "name": name, "ahead": ahead}
    path.write_text(json.dumps(trace))


def merge(paths: Sequence[Path], merged: Path) -> None:
    """One trace of the traces that `note_rank` has named. Times count from the first event of any rank."""
    traces = [json.loads(path.read_text()) for path in paths]
    starts = [_start(trace) for trace in traces]
    first = min(
        (start + event["ts"] for trace, start in zip(traces, starts, strict=True) for event in _timed(trace)),
        default=0.0,
    )
    events = [
        event
        for trace, start in zip(traces, starts, strict=True)
        for event in _placed(trace["traceEvents"], trace[_OWN], start - first)
    ]
    merged.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _start(trace: Mapping[str, Any]) -> float:
    """Microseconds at which the trace's times count from zero, on the clock of rank 0."""
    return float(trace.get("baseTimeNanoseconds", 0)) / 1e3 - 1e6 * float(trace[_OWN]["ahead"])


def _timed(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if "ts" in event and event.get("ph") != "M"]


def _placed(events: Sequence[dict[str, Any]], own: Mapping[str, Any], later: float) -> list[dict[str, Any]]:
    """The events of one rank, with processes of their own and named, `later` microseconds later."""
    rank, numbers = int(own["rank"]), dict[Any, int]()
    known: dict[int, str] = {}
    found = []
    for event in events:
        pid = event.get("pid", "")
        number = numbers.setdefault(pid, _NAMES_PER_RANK * rank + len(numbers))
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index", "process_labels"):
            if event["name"] != "process_sort_index":
                known[number] = " ".join(filter(None, [known.get(number), *map(str, event["args"].values())]))
            continue
        placed = {**event, "pid": number}
        if "ts" in event:
            placed["ts"] = event["ts"] + (later if event.get("ph") != "M" else 0)
        if "id" in event:
            placed["id"] = f"{rank}.{event['id']}"
        found.append(placed)
    for pid, number in numbers.items():
        arguments = {"name": f"{own['name']}: {known.get(number, pid)}", "sort_index": number}
        for name, key in (("process_name", "name"), ("process_sort_index", "sort_index")):
            found.append({"ph": "M", "name": name, "pid": number, "tid": 0, "ts": 0, "args": {key: arguments[key]}})
    return found
