"""Processes of a job that a signal has stopped (SIGSTOP, a scheduler that suspends), or that hold Python's lock in a
call that does not return: they do not hear that it has ended, and would stay for ever with what they hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping

from .job import POLL, Job
from .processes import is_running, is_stopped

_NEARBY = 8  # ranks on either side of one, among which are most of its machine's


def kill_if_stopped(host: str, pid: int) -> bool:
    """SIGKILL is what a stopped process still gets. Whether it was stopped, and on this machine."""
    stopped = host == socket.gethostname() and is_stopped(pid)
    if stopped:
        with contextlib.suppress(ProcessLookupError):  # another rank has
            os.kill(pid, signal.SIGKILL)
    return stopped


def kill_stopped(job: Job, ranks: Iterable[int]) -> None:
    """Those of them, without this one, that are stopped on this machine."""
    for rank in ranks:
        if rank != job.rank:
            kill_if_stopped(*job.process_of(rank))


def neighbors(job: Job) -> dict[int, int]:
    """Process ids by rank of those ranks around this one that are of its machine."""
    around = range(max(0, job.rank - _NEARBY), min(job.world_size, job.rank + _NEARBY + 1))
    found = {rank: job.process_of(rank) for rank in around if rank != job.rank}
    return {rank: pid for rank, (host, pid) in found.items() if host == socket.gethostname()}


def kill_left_behind(processes: Mapping[int, int], seconds: float) -> list[int]:
    """Wait while some of these are stopped, and end those that are for so long; returns their ranks. Looks are counted
    and not seconds, since this process may be stopped with them and go on a moment earlier.
    """
    stopped, killed = dict(processes), []
    for _ in range(1 + int(seconds / POLL)):
        stopped = {rank: pid for rank, pid in stopped.items() if is_stopped(pid)}
        if not stopped:
            return []
        time.sleep(POLL)
    for rank, pid in stopped.items():
        if _is_alike(pid) and kill_if_stopped(socket.gethostname(), pid):
            killed.append(rank)
    return killed


def kill_deaf(job: Job, rank: int, seconds: float) -> None:
    """One of this machine that runs, and has said nothing when it was asked, and does not end in so many seconds."""
    host, pid = job.process_of(rank)
    if pid == os.getpid():  # of another machine that has the name of this one
        return
    deadline = time.monotonic() + seconds
    while is_running(host, pid):
        if time.monotonic() > deadline:
            if _is_alike(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _is_alike(pid: int) -> bool:
    """Whether a process runs what this one does, and has not got the number of one that has ended."""
    try:
        return os.path.samefile(f"/proc/{pid}/exe", "/proc/self/exe")
    except OSError:
        return False
