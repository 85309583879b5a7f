"""A step at which all ranks do something that any of them has asked for, agreed on without a message per step.

A rank that wants it promises to stop at the step that it is at. The watching threads of the others look for that twice
a second (`watch`), and promise the step that their main thread comes to next. No rank passes the step that it has
promised before it knows all promises; what is agreed on is the latest of them, which no rank has passed. Threads
promise, not scripts, so nobody who waits for the promises keeps anybody from giving one. A rank that comes to no
further step says so where it has promised none: who asks in the last step would wait for it otherwise.

    <name>/asked      somebody wants it
    <name>/at/<rank>  the rank's promise, "inf" of one that comes to no step
"""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta

from . import groups
from .job import Job, stop_waiting

_LOOK = 1.0  # seconds between two looks for ranks that will not promise any more


class Appointment:
    """Of all ranks, under a name that they all give it. Each calls `arrive` at the same points of its script."""

    def __init__(self, job: Job, name: str) -> None:
        self._job, self._name = job, name
        self._generation = job.generation
        self._arrived = 0
        self._promise: float | None = None
        self._agreed: float | None = None
        self._lock = threading.Lock()

    def look(self) -> None:
        """Promise, if anybody asks. From the watching thread."""
        self._begin_anew()
        if self._promise is None and self._job.ask(f"{self._name}/asked") is not None:
            with self._lock:
                self._promise = self._promise or self._arrived + 1
            self._tell()

    def arrive(self, wanted: bool) -> bool:
        """Whether it is time. `wanted`: by this rank, from now on."""
        self._begin_anew()
        asks = False
        with self._lock:
            self._arrived += 1
            if wanted and self._promise is None:
                self._promise, asks = self._arrived, True
        if asks:
            self._job.announce(f"{self._name}/asked")
            self._tell()
        if self._promise is None or self._arrived < self._promise:
            return False
        if self._agreed is None:
            self._agreed = self._latest()
        return self._arrived >= self._agreed

    def leave(self) -> None:
        """This rank arrives no more, though its script may go on."""
        self._begin_anew()
        with self._lock:
            is_open = self._promise is None
            if is_open:
                self._promise = math.inf
        if is_open:
            self._tell()

    def _tell(self) -> None:
        self._job.tell(f"{self._name}/at/{self._job.rank}", str(self._promise))

    def _begin_anew(self) -> None:
        """After a recovery, which no key outlives, and before which ranks may have come to different steps."""
        with self._lock:
            if self._generation != self._job.generation:
                self._generation, self._arrived = self._job.generation, 0
                self._promise = self._agreed = None

    def _latest(self) -> float:
        """Of all promises; never, where a rank comes to no further step, or has come to the end of its script."""
        job, limit = self._job, groups.get_timeout() or timedelta(minutes=30)
        deadline = time.monotonic() + limit.total_seconds()
        missing = list(range(job.world_size))
        while not job.wait_for([f"{self._name}/at/{rank}" for rank in missing], _LOOK):
            job.require_store("ranks could not agree on a step")
            stop_waiting()
            missing = [rank for rank in missing if job.ask(f"{self._name}/at/{rank}") is None]
            if any(job.ask(f"left/{rank}") is not None for rank in missing):
                return math.inf
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Timed out waiting {limit.total_seconds() * 1000:.0f}ms for rank(s) {missing} to agree on a step"
                )
            job.find_dead()
        promises = [job.ask(f"{self._name}/at/{rank}") for rank in range(job.world_size)]
        job.require_store("ranks could not agree on a step")
        return max(float(promise or 0) for promise in promises)
