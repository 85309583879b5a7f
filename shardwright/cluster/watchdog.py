"""The thread that ends a job in which a step takes longer than its budget, and says which rank the others wait for.

It looks at the clock and at the notes of `heart`, without a collective and without the store, which may hang as well.
When this rank's call is overdue, or the next one is, it asks the others through the store: everybody writes where it
stands (`standing`), from its watching thread (`watch`), so that a main thread that waits in C++ cannot keep it from
that. From what comes in follows who is late (`verdict`). Then the job ends as it does by any failure (`ending`), with
an exit code of its own.

    stalled              "<n> <rank>": the last inquiry and who makes it; n is odd while it is open
    standing/<n>/<rank>  what the rank has answered to the n-th

One rank inquires at a time. Others whose calls are overdue as well answer like everybody, and wait for what comes of
it; they inquire next if the job has not ended, or if the one that did is gone.

Calls that no step is made of, such as saving, may take as long as disks do. There a rank is late that has not answered
two inquiries in turn, and has given no sign of life in between.

Where the store does not answer, because the rank that serves it is stopped, each rank says so for itself and ends: from
a call that is overdue, and from whatever else waits for other ranks, since who asks such a store waits for ever.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..logging import get_dist_logger
from . import groups
from .ending import leave_alone
from .failure import LEFT, STALLED, Failure, main_stack
from .heart import OUTSIDE, heart
from .job import POLL, Job
from .processes import is_running, is_stopped
from .standing import COMPILATION, DEBUGGER, Standing, stand
from .stopped import kill_if_stopped, kill_stopped

_ANSWERS = 3.0  # seconds for all ranks to say where they stand
_DEALING = 1.0  # seconds more for who has asked to make something of it
_STORE = 10.0  # seconds for the store to take part in that
_INQUIRY = "stalled"
_STOPPED = 10 * POLL  # between two looks of a process that was stopped


class Watchdog(threading.Thread):
    """Of one rank. `asked_since`: since when, on the monotonic clock, the watching thread waits for the store's answer;
    None while it does not.
    """

    def __init__(self, job: Job, asked_since: Callable[[], float | None]) -> None:
        super().__init__(name="shardwright-watchdog", daemon=True)
        self._job, self._asked_since = job, asked_since
        self._done = threading.Event()
        self._unheard: dict[int, str | None] = {}  # ranks that have not answered the last inquiry, with their last beat
        self._looked = self._awake = time.monotonic()  # the last look, and the end of the last time it was stopped for

    def stop(self) -> None:
        self._done.set()
        self.join(2 * POLL)

    def run(self) -> None:
        self._looked = self._awake = time.monotonic()
        told = 0  # of what number of calls, that there has been none since for long
        while not self._done.wait(POLL):
            self._excuse_stops()
            self._note_server()
            unheard = self._unanswered()
            if unheard is not None:
                _end_alone(self._job, f"it waits, in {heart.words()}, and has heard nothing for {unheard:.0f} s")
            if heart.number != told and _says_that_it_idles(self._job):
                told = heart.number
            took = heart.overdue()
            if took is None or self._job.failure is not None or (self._job.ending and not heart.call):
                continue
            number = heart.number
            inquiry = threading.Thread(target=_inquire, args=(self._job, took, self._unheard), daemon=True)
            inquiry.start()
            self._wait_for(inquiry)
            is_lost = inquiry.is_alive() or not self._job.has_store
            if is_lost and self._job.failure is None and heart.number == number and heart.overdue():
                _end_alone(self._job, f"{_said(heart.call, took)}; its budget is {heart.budgets.why(heart.call)}")

    def _excuse_stops(self) -> float:
        """Seconds that this process was stopped for since the last look (SIGSTOP and SIGCONT, a suspended job)."""
        before, self._looked = self._looked, time.monotonic()
        if self._looked - before <= _STOPPED:
            return 0.0
        heart.excuse(before, self._looked)
        self._awake = self._looked
        return self._looked - before

    def _note_server(self) -> None:
        """Whether who serves the store is stopped while it is asked. Some rank ends it then, and the store with it."""
        job = self._job
        if self._asked_since() is not None:
            host, pid = job.server
            job.server_stopped = job.server_stopped or (host == socket.gethostname() and is_stopped(pid))
        elif job.has_store:
            job.server_stopped = False

    def _unanswered(self) -> float | None:
        """Seconds for which the watching thread has waited for a store that will not answer; None of others."""
        asked = self._asked_since()
        if asked is None or not is_silent(self._looked - max(asked, self._awake), self._job.server):
            return None
        return self._looked - asked

    def _wait_for(self, inquiry: threading.Thread) -> None:
        """Until it has ended, or the store has had its time for it: what the watching thread has waited before counts
        too.
        """
        deadline = time.monotonic() + _STORE
        while inquiry.is_alive() and self._looked < deadline:
            inquiry.join(POLL)
            deadline += self._excuse_stops()
            if self._unanswered() is not None:
                return


class Inquiry(NamedTuple):
    """See `stalled` above. `number` 0: there was none."""

    number: int
    rank: int

    @property
    def is_open(self) -> bool:
        return self.number % 2 == 1

    def __str__(self) -> str:
        return f"{self.number} {self.rank}"

    @staticmethod
    def read(text: str | None) -> Inquiry:
        number, _, rank = (text or "0 0").partition(" ")
        return Inquiry(int(number), int(rank))


def last_inquiry(job: Job) -> Inquiry:
    return Inquiry.read(job.ask(_INQUIRY))


def answer(job: Job, inquiry: int) -> None:
    """What the watching thread of each rank does when a rank has found its call overdue."""
    job.tell(f"standing/{inquiry}/{job.rank}", stand(job.rank, job.place).to_json())


def elect(job: Job) -> Inquiry | None:
    """The inquiry that this rank is to make; None where another rank makes one, which has been waited for."""
    last = last_inquiry(job)
    if last.is_open:
        deadline = time.monotonic() + _ANSWERS + _DEALING
        while time.monotonic() < deadline:
            if job.failure is not None or last_inquiry(job) != last:
                return None
            time.sleep(0.1)
    # behind one that is closed, or in place of one whose rank is gone
    mine = Inquiry(last.number + (2 if last.is_open else 1), job.rank)
    return mine if job.replace(_INQUIRY, str(last) if last.number else "", str(mine)) else None


def _inquire(job: Job, took: float, unheard: dict[int, str | None]) -> None:
    """End the job unless it has gone on meanwhile. `unheard` are those who did not answer the last inquiry."""
    call, number = heart.call, heart.number
    inquiry = elect(job)
    if inquiry is None or heart.number != number:
        if inquiry is not None:
            _close(job, inquiry)
        return
    mine = stand(job.rank, job.place)
    job.tell(f"standing/{inquiry.number}/{job.rank}", mine.to_json())
    job.wait_for([f"standing/{inquiry.number}/{rank}" for rank in range(job.world_size)], _ANSWERS)
    if heart.number != number or heart.overdue() is None:  # just in time
        _close(job, inquiry)
        return
    told = [job.ask(f"standing/{inquiry.number}/{rank}") for rank in range(job.world_size)]
    standings = {rank: Standing.from_json(text) for rank, text in enumerate(told) if text is not None}
    silent = [rank for rank in range(job.world_size) if rank not in standings]
    dead = job.find_dead(silent) if silent else None
    excused = is_excused(standings, learned=isinstance(heart.budgets.given, str))
    if heart.budgets.of_silence(call) is not None and not _is_silent_still(job, standings, unheard):
        excused = True
    if excused and dead is None:
        heart.excuse(heart.since, time.monotonic())  # the budget anew
        _close(job, inquiry)
        return
    failure = dead or job.first(_failure(job, {job.rank: mine, **standings}, _said(call, took), call))
    job.announce("ended")
    if failure.kind == STALLED:
        kill_stopped(job, [failure.rank])
    job.learn(failure)


def _is_silent_still(job: Job, standings: Mapping[int, Standing], unheard: dict[int, str | None]) -> bool:
    """Whether a rank has not answered, nor written a sign of life since the inquiry before, which it did not answer
    either.
    """
    before = dict(unheard)
    unheard.clear()
    for rank in range(job.world_size):
        if rank not in standings and job.ask(f"left/{rank}") is None:
            unheard[rank] = job.ask(f"beat/{rank}")
    return any(rank in before and before[rank] == beat for rank, beat in unheard.items())


def _close(job: Job, mine: Inquiry) -> None:
    """Unless another rank has taken it over."""
    job.replace(_INQUIRY, str(mine), str(mine._replace(number=mine.number + 1)))


def is_excused(standings: Mapping[int, Standing], learned: bool) -> bool:
    """A rank in a debugger holds the others up on purpose. A compilation is longer than steps that a budget was learned
    from, and within one that was given.
    """
    return any(each.busy == DEBUGGER or (learned and each.busy == COMPILATION) for each in standings.values())


def _failure(job: Job, standings: Mapping[int, Standing], took: str, call: str) -> Failure:
    silent = [rank for rank in range(job.world_size) if rank not in standings]
    gone = {rank: how for rank in silent if (how := job.ask(f"left/{rank}")) is not None}
    late, why = verdict(standings, sorted(gone) or silent)
    if late in silent:
        words = job.last_words_of(late)
        why += f"; it was last seen in {words}" if words else ""
    lines = [standing.line() for _, standing in sorted(standings.items())]
    lines += [f"rank {rank} ({job.ask(f'place/{rank}') or 'no place yet'}) does not answer" for rank in silent]
    needs = "steps that need" if heart.budgets.of(call) is not None else "what keeps ranks silent for"
    summary = (
        f"{took} on rank {job.rank}; its budget is {heart.budgets.why(call)}. Look at what rank {late} was doing; "
        + (f"{needs} longer: launch(step_timeout=seconds)" if call else "what needs longer: a larger one")
    )
    found = standings.get(late)
    return Failure(
        rank=late,
        speaker=job.rank,
        place=job.ask(f"place/{late}") or "",
        doing="",
        kind=LEFT if late in gone else STALLED,
        error=f"{gone.get(late, f'held the job up: {why}')}\n{summary}",
        frames=found.frames if found is not None else (),
        traceback="\n".join([summary, *lines, "", *(each.whole() for each in standings.values())]),
        when=time.time(),
    )


def verdict(standings: Mapping[int, Standing], silent: list[int]) -> tuple[int, str]:
    """(the rank that the others wait for, why it is that one).

    One that does not answer is stopped, or deaf in a call that holds Python's lock, or its machine is gone. Else
    one that computes while others wait, the one with the fewest calls behind it first. Where all wait, one that has
    called fewer collectives of a group than its peers; but where few have called one more, in the script's own
    code, than others that are calls further on, one of these few.
    """
    if silent:
        why = "stopped, or in a call that holds Python's lock, or its machine is gone"
        return silent[0], f"it gives no sign of life ({why})"
    works = [each for each in standings.values() if not each.waits]
    if 0 < len(works) < len(standings):
        first = min(works, key=lambda each: (each.number, each.rank))
        return first.rank, f"it did not come, but was in {first.doing}"
    for ranks, highest in _highest(standings).items():
        alone = _called_alone([each for each in standings.values() if ranks in each.groups], ranks)
        if alone is not None:
            return alone.rank, (
                f"over ranks {ranks} it has called {alone.groups[ranks]} collectives, and others, which are further "
                f"on, fewer: no other rank calls the {alone.collective or 'one'} that it is in"
            )
        behind = [each for each in standings.values() if each.groups.get(ranks, highest) < highest]
        if behind:
            first = min(behind, key=lambda each: (each.groups[ranks], each.rank))
            return first.rank, (
                f"over ranks {ranks} it has called {first.groups[ranks]} collectives and others {highest}, and it is "
                f"in {first.collective or first.doing}"
            )
    first = min(standings.values(), key=lambda each: (each.number, each.rank))
    how = "no rank waits for another" if works else "all ranks wait for one another"
    return first.rank, f"{how}, and it came least far: it is in {first.collective or first.doing}"


def _called_alone(members: list[Standing], ranks: str) -> Standing | None:
    """The first of those in a group that wait in a collective of the script's that the others have passed by."""

    def passed_by(one: Standing, other: Standing) -> bool:
        return one.number < other.number and one.groups[ranks] > other.groups[ranks]

    outside = [each for each in members if each.doing == OUTSIDE]
    called = [one for one in outside if any(passed_by(one, other) for other in members)]
    passed = [other for other in members if any(passed_by(one, other) for one in called)]
    return called[0] if called and len(called) <= len(passed) else None


def _highest(standings: Mapping[int, Standing]) -> dict[str, int]:
    found: dict[str, int] = {}
    for standing in standings.values():
        for ranks, count in standing.groups.items():
            found[ranks] = max(found.get(ranks, 0), count)
    return found


def _said(call: str, took: float) -> str:
    return f"{call or OUTSIDE} had taken {took:.0f} s"


def _says_that_it_idles(job: Job) -> bool:
    """Rank 0 does where nothing ends a job that is in the script's own code for longer than any rank would wait for
    another: all of them may be.
    """
    limit, idle = groups.get_timeout(), heart.idle()
    if job.rank or job.ending or limit is None or heart.budgets.idle is not None or idle < limit.total_seconds():
        return False
    _, frames = main_stack()
    get_dist_logger().warning(
        f"rank 0 has been in {OUTSIDE} for {idle:.0f} s; launch(idle_timeout=seconds) ends a job that is for longer"
        + "".join(f"\n  {frame}" for frame in frames)
    )
    return True


def is_silent(seconds: float, server: tuple[str, int]) -> bool:
    """Whether a store that has not answered for so long will not, and the main thread waits for that or for other
    ranks. What it computes meanwhile, it may.
    """
    given, limit = heart.budgets.given, groups.get_timeout()
    if given is None or (isinstance(given, str) and limit is None):
        return False
    patience = limit.total_seconds() if isinstance(given, str) and limit is not None else float(given)
    host, pid = server
    if not (host == socket.gethostname() and is_stopped(pid)):
        patience += _STORE
    return seconds > patience and main_stack()[0]


def _end_alone(job: Job, why: str) -> None:
    """The store does not answer."""
    host, pid = job.server
    stopped = kill_if_stopped(host, pid)
    how = "was stopped" if stopped else "may be stopped" if is_running(host, pid) else "has ended"
    served = f"{job.served_by} (process {pid} on {host}), which serves it, {how}"
    mine = stand(job.rank, job.place)
    leave_alone(f"{mine.who} ended the job: {why}. The job's store does not answer: {served}\n{mine.whole()}")
