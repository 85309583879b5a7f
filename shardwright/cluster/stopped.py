"""Processes of a job that a signal has stopped (SIGSTOP, a scheduler that suspends): they do not hear that it has
ended, and would stay for ever with what they hold.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterable

from .job import Job


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine has been stopped by a signal."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


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
