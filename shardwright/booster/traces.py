"""Chrome traces of several ranks as one, with the ranks named and on one clock.

A trace may have a GiB: none is ever held whole. `python traces.py MERGED TRACE ...` merges beside who starts it, and
needs Python alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MERGED = "merged.json"
_OWN = "shardwright"  # the key of what is noted in a rank's trace
_EVENTS = "traceEvents"
_NAMES_PER_RANK = 1000
_PIECE = 1 << 20  # characters that are read at a time


def trace_path(directory: Path, rank: int) -> Path:
    return directory / f"rank{rank}.json"


def note_rank(path: Path, rank: int, name: str, ahead: float) -> None:
    """Write at the end of the trace whose it is. ahead: seconds that the rank's clock is ahead of that of rank 0."""
    own = json.dumps({_OWN: {"rank": rank, "name": name, "ahead": ahead}})
    with path.open("r+b") as trace:
        end = trace.seek(0, os.SEEK_END)
        start = max(0, end - 64)
        trace.seek(start)
        last = trace.read().rstrip()
        if not last.endswith(b"}"):
            raise ValueError(f"{path} is no whole trace: it does not end with a brace")
        trace.seek(start + len(last) - 1)
        trace.write(f",\n{own[1:]}".encode())
        trace.truncate()


def merge(paths: Sequence[Path], merged: Path) -> None:
    """One trace of the traces that `note_rank` has named. Times count from the first event of any rank. Each is read
    twice, event by event: for its clock, and for what it holds.
    """
    heads = [_head(path) for path in paths]
    first = min((start + earliest for start, earliest, _ in heads if earliest is not None), default=0.0)
    unfinished = merged.with_name(f"{merged.name}.part")
    with unfinished.open("w") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        parting = "\n"
        for path, (start, _, own) in zip(paths, heads, strict=True):
            for event in _placed((value for key, value in entries(path) if key is None), own, start - first):
                out.write(parting + json.dumps(event))
                parting = ",\n"
        out.write("\n]}\n")
    unfinished.replace(merged)


def _head(path: Path) -> tuple[float, float | None, Mapping[str, Any]]:
    """Microseconds at which the trace's times count from zero, on the clock of rank 0; the first of its times; and
    whose it is.
    """
    others: dict[str, Any] = {}
    earliest: float | None = None
    for key, value in entries(path):
        if key is not None:
            others[key] = value
        elif "ts" in value and value.get("ph") != "M":
            earliest = value["ts"] if earliest is None else min(earliest, value["ts"])
    own = others[_OWN]
    return float(others.get("baseTimeNanoseconds", 0)) / 1e3 - 1e6 * float(own["ahead"]), earliest, own


def entries(path: Path) -> Iterator[tuple[str | None, Any]]:
    """(None, event) for each event of a trace, and (key, value) for what else it holds."""
    with path.open() as trace:
        text = _Text(trace.read)
        text.skip("{")
        while text.peek() != "}":
            key = text.value()
            text.skip(":")
            if key == _EVENTS:
                text.skip("[")
                while text.peek() != "]":
                    yield None, text.value()
                    text.skip_if(",")
                text.skip("]")
            else:
                yield key, text.value()
            text.skip_if(",")


class _Text:
    """JSON that is read in pieces, one value at a time."""

    def __init__(self, read: Callable[[int], str]) -> None:
        self._read, self._decode = read, json.JSONDecoder().raw_decode
        self._held, self._at, self._over = "", 0, False

    def _more(self) -> None:
        piece = self._read(_PIECE)
        self._over = not piece
        self._held, self._at = self._held[self._at :] + piece, 0

    def peek(self) -> str:
        """The next character that is no space."""
        while True:
            while self._at < len(self._held) and self._held[self._at].isspace():
                self._at += 1
            if self._at < len(self._held):
                return self._held[self._at]
            if self._over:
                raise ValueError("a trace ends before its last brace")
            self._more()

    def skip(self, wanted: str) -> None:
        found = self.peek()
        if found != wanted:
            raise ValueError(f"a trace has {found!r} where {wanted!r} should stand")
        self._at += 1

    def skip_if(self, wanted: str) -> None:
        if self.peek() == wanted:
            self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                found, end = self._decode(self._held, self._at)
                if end < len(self._held) or self._over:  # a number may go on in the next piece
                    self._at = end
                    return found
            except json.JSONDecodeError:
                if self._over:
                    raise
            self._more()


def _placed(events: Iterator[dict[str, Any]], own: Mapping[str, Any], later: float) -> Iterator[dict[str, Any]]:
    """The events of one rank, with processes of their own and named, `later` microseconds later."""
    rank, numbers = int(own["rank"]), dict[Any, int]()
    known: dict[int, str] = {}
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
        yield placed
    for pid, number in numbers.items():
        arguments = {"name": f"{own['name']}: {known.get(number, pid)}", "sort_index": number}
        for name, key in (("process_name", "name"), ("process_sort_index", "sort_index")):
            yield {"ph": "M", "name": name, "pid": number, "tid": 0, "ts": 0, "args": {key: arguments[key]}}


if __name__ == "__main__":
    merge([Path(each) for each in sys.argv[2:]], Path(sys.argv[1]))
