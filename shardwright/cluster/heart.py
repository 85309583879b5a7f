"""What this process is in, noted by its hot code and read by threads that watch: a call, a step, an action, a bucket.

Notes are single attributes, written by the main thread without a lock, a few tens of nanoseconds each; nothing is put
into words before somebody asks. How long calls of a kind take is learned here, too: `Budgets`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

# Of the job's timeout, what a learned budget grants at least: a script may let others wait for its rank 0, and what it
# has asked to be waited for must not end its job.
LEAST = 0.9
FACTOR = 20.0  # of the longest that is remembered
_REMEMBERED = 50  # calls of a kind
_ENOUGH = 5  # calls of a kind, from which a budget is learned
OUTSIDE = "code outside of shardwright"  # what a rank is in between two calls
# Calls that training repeats. How long saving or loading takes follows from disks.
STEPS = (
    *("execute_pipeline", "backward", "step", "forward"),
    *("clip_grad_by_norm", "clip_grad_by_value", "get_grad_norm"),
    "compare",  # the first batches, in front of a forward
)
_BEFORE = ("boost",)  # calls behind which a script still prepares, so that what is between two does not begin there


class Budgets:
    """How long a call may take.

    given  seconds, "auto" to learn them from the calls before, None for ever
    least  seconds that are granted at least where they are learned
    idle   seconds between two calls, None for ever
    """

    def __init__(self, given: float | str | None = "auto", least: float = 0.0) -> None:
        self.given, self.least = given, least
        self.idle: float | None = None
        self._took: dict[str, deque[float]] = {}

    def note(self, call: str, seconds: float) -> None:
        took = self._took.get(call)
        if took is None:
            took = self._took[call] = deque(maxlen=_REMEMBERED)
        took.append(seconds)

    def of(self, call: str) -> float | None:
        """Seconds; None while nothing is known, and for calls that no step is made of."""
        if call.rpartition(".")[2] not in STEPS or self.given is None:
            return None
        if not isinstance(self.given, str):
            return self.given
        took = self._took.get(call, ())
        return max(self.least, FACTOR * max(took)) if len(took) >= _ENOUGH else None

    def of_silence(self, call: str) -> float | None:
        """Seconds in which a rank must give a sign of life while others are in a call that may take as long as it
        takes; None for ever, and for calls that have a budget.
        """
        if not call or call.rpartition(".")[2] in STEPS or self.given is None:
            return None
        return self.least if isinstance(self.given, str) else self.given

    def why(self, call: str) -> str:
        """The budget of a call and where it comes from, for messages. `call` is "" between two."""
        if not call:
            return f"{self.idle:g} s, as launch(idle_timeout=...) says"
        seconds, silence = self.of(call), self.of_silence(call)
        if silence is not None:
            how = "9/10 of launch(timeout=...)" if isinstance(self.given, str) else "launch(step_timeout=...)"
            return f"its own, but no rank may be silent for {silence:g} s in it, as {how} says"
        if seconds is None:
            return "not known"
        if not isinstance(self.given, str):
            return f"{seconds:g} s, as launch(step_timeout=...) says"
        return f"{seconds:.0f} s, {FACTOR:g} times the longest of the last and at least {self.least:g} s"


class Action(Protocol):
    """Of a pipeline (`pipeline.planning.actions`). `microbatch` is -1 for what belongs to a stage alone."""

    @property
    def stage(self) -> int: ...

    @property
    def microbatch(self) -> int: ...


class Heart:
    """
    call    the outermost call that communicates ("Booster.execute_pipeline"), "" outside of any
    since   when it began, or the one before ended, on the monotonic clock; infinite where nothing is timed
    number  calls that have begun
    action  of a pipeline, the one that runs or ran last; printed when asked
    bucket  of gradients, the one that was launched last
    """

    def __init__(self) -> None:
        self.call = ""
        self.since = math.inf
        self.number = 0
        self.action: Action | None = None
        self.bucket: int | None = None
        self._before = math.inf  # `since` of what was there before the call
        self.budgets = Budgets()
        self._counts: dict[str, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether a call that begins now is the outermost. Only for that one are `enter` and `leave` called."""
        return not self.call

    def enter(self, call: str) -> None:
        self._before = self.since
        self.since = time.monotonic()
        self.call = call
        self.number += 1
        self._counts[call] = self._counts.get(call, 0) + 1
        self.action = self.bucket = None

    def leave(self, completed: bool = True) -> None:
        call, began, now = self.call, self.since, time.monotonic()
        # first: who reads in between must not take the call's time for that behind it
        self.since = max(now, self._before) if call.rpartition(".")[2] in _BEFORE else now
        self.call = ""
        if completed and call:
            self.budgets.note(call, now - began)

    def excuse(self, start: float, stop: float) -> None:
        """The process was stopped in between, on the monotonic clock, and with it what had begun."""
        if self.since <= start:
            self.since += stop - start

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """What takes longer than a step inside of one; the rest of it begins anew."""
        self.since = math.inf
        try:
            yield
        finally:
            self.since = time.monotonic()

    def overdue(self) -> float | None:
        """Seconds that the call has run, or that there has been none, if these are more than the budget: than that of
        silence where it has none of its own.
        """
        call, since = self.call, self.since
        budget = (self.budgets.of(call) or self.budgets.of_silence(call)) if call else self.budgets.idle
        took = time.monotonic() - since
        return took if budget is not None and took > budget else None

    def idle(self) -> float:
        """Seconds since the last call; 0 in one, and before the first."""
        since = self.since
        return 0.0 if self.call else max(0.0, time.monotonic() - since)

    def words(self) -> str:
        """ "Booster.execute_pipeline (7), action 1F2 (stage 1, microbatch 2)": the seventh such call and what came
        last in it.
        """
        call, action, bucket = self.call, self.action, self.bucket
        found = [f"{call} ({self._counts.get(call, 1)})" if call else OUTSIDE]
        if call and action is not None:
            of = f", microbatch {action.microbatch}" if action.microbatch >= 0 else ""
            found.append(f"action {action} (stage {action.stage}{of})")
        if call and bucket is not None:
            found.append(f"gradient bucket {bucket}")
        return ", ".join(found)


heart = Heart()
