"""The error of `run_ranks`: which rank failed first and why, what the others were doing."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from .rank_process import Failure, end_with_caller

_OUTPUT_LINES = 20  # of a rank that died without a traceback
# The time at which the caller sees a death lies a little after it, and peers may have reported a broken connection by
# then.
_DEATH_LAG = 0.5


@dataclass(frozen=True)
class RankOutcome:
    """How one rank of a call ended."""

    rank: int
    exitcode: int | None  # None: still running; negative: killed by that signal
    failure: Failure | None  # the exception it raised
    seen: float  # when the caller saw it, time.monotonic()
    finished: bool  # the function returned
    output: str
    stacks: str

    @property
    def failed(self) -> bool:
        return self.failure is not None or (self.exitcode is not None and (self.exitcode != 0 or not self.finished))

    @property
    def when(self) -> float:
        """Time of the failure. An abort is often the answer to a peer that has gone, other signals come first."""
        if self.failure is not None:
            return self.failure.when
        return self.seen if self.exitcode in (-signal.SIGABRT, None) else self.seen - _DEATH_LAG

    def summary(self) -> str:
        """One line."""
        if self.failure is not None:
            return self.failure.summary.splitlines()[0] if self.failure.summary else "raised"
        if self.exitcode is None:
            if self.finished:
                return "returned, but did not exit"
            return f"still running{_innermost_frame(self.stacks)}"
        if self.exitcode < 0:
            return f"killed by {_signal_name(-self.exitcode)}"
        if self.exitcode > 0:
            return f"exited with code {self.exitcode}"
        return "ended normally" if self.finished else "exited with code 0 before its function returned"

    def details(self) -> str:
        """All that is known about the end of this rank."""
        if self.failure is not None:
            return self.failure.traceback.rstrip()
        parts = []
        if self.exitcode is not None and self.failed:
            parts.append(
                f"rank {self.rank} was {self.summary()}" if self.exitcode < 0 else f"rank {self.rank} {self.summary()}"
            )
            if self.exitcode > 0 and not self.stacks and not self.output:
                parts.append(
                    '(before its function was called; does the script lack the `if __name__ == "__main__":` guard?)'
                )
        if self.stacks.strip():
            parts.append(self.stacks.rstrip())
        if self.output.strip():
            lines = self.output.rstrip().splitlines()[-_OUTPUT_LINES:]
            parts.append("last output:\n" + "\n".join(f"  {line}" for line in lines))
        return "\n".join(parts)


class RankError(RuntimeError):
    """A rank raised, died, or did not end in time; `outcomes` tells it rank by rank, `first` is the rank to look at."""

    def __init__(self, message: str, outcomes: Sequence[RankOutcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)

    @property
    def first(self) -> int | None:
        """The rank that failed first; None when all of them were merely too slow."""
        failed = [outcome for outcome in self.outcomes if outcome.failed]
        return min(failed, key=lambda outcome: outcome.when).rank if failed else None


def failure_text(outcomes: Sequence[RankOutcome]) -> str:
    """The others in a line each, then the rank that failed first with its traceback, and what signals killed."""
    first = min((outcome for outcome in outcomes if outcome.failed), key=lambda outcome: outcome.when)
    lines = [f"rank {first.rank} of {len(outcomes)} failed first"]
    lines += [f"  rank {outcome.rank}: {outcome.summary()}" for outcome in outcomes if outcome is not first]
    lines += [f"--- rank {first.rank}, failed first ---", first.details()]
    # Which of a lost connection and an abort came first is a guess, and the stacks of the abort are gone afterwards.
    for outcome in outcomes:
        if outcome is not first and (outcome.exitcode or 0) < 0 and outcome.stacks.strip():
            lines += [f"--- rank {outcome.rank}, {outcome.summary()} ---", outcome.details()]
    return "\n".join(lines)


def timeout_text(outcomes: Sequence[RankOutcome], timeout: float) -> str:
    """Every rank in a line, then the stacks of those that had not ended."""
    lines = [f"not all of {len(outcomes)} ranks ended within {timeout:g} s"]
    lines += [f"  rank {outcome.rank}: {outcome.summary()}" for outcome in outcomes]
    for outcome in outcomes:
        if outcome.exitcode is None:
            lines += [f"--- rank {outcome.rank} ---", outcome.details() or "no stacks"]
    return "\n".join(lines)


def without_watcher(stacks: str) -> str:
    """A dump of all threads without the one that watches the caller."""
    threads = re.split(r"^(?=Current thread |Thread )", stacks, flags=re.MULTILINE)
    return "".join(part for part in threads if f"in {end_with_caller.__name__}\n" not in part)


def _innermost_frame(stacks: str) -> str:
    """Where the main thread (the last one of a dump) stands: ' in all_reduce (distributed_c10d.py:2970)'."""
    last = re.split(r"^(?:Current thread|Thread) ", stacks, flags=re.MULTILINE)[-1]
    frame = re.search(r'File "([^"]*)", line (\d+) in (\S+)', last)
    return f" in {frame[3]} ({frame[1].rsplit('/', 1)[-1]}:{frame[2]})" if frame else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
