"""Processes that are stopped when the others of their job are through."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import cast

from shardwright.cluster.job import Job
from shardwright.cluster.processes import is_stopped
from shardwright.cluster.stopped import kill_left_behind, neighbors


def stopped() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os.kill(process.pid, signal.SIGSTOP)
    while not is_stopped(process.pid):
        time.sleep(0.01)
    return process


def test_who_stays_stopped_is_ended() -> None:
    stays, goes_on, ended = stopped(), stopped(), subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    threading.Timer(0.3, lambda: os.kill(goes_on.pid, signal.SIGCONT)).start()
    try:
        assert kill_left_behind({1: stays.pid, 2: goes_on.pid, 3: ended.pid}, 2.0) == [1]
        assert stays.wait() == -signal.SIGKILL
        assert goes_on.poll() is None
        begun = time.monotonic()
        assert kill_left_behind({2: goes_on.pid}, 60.0) == []
        assert time.monotonic() - begun < 1  # nobody waits for who runs
    finally:
        for process in (stays, goes_on):
            process.kill()
            process.wait()


def test_ranks_of_this_machine_are_looked_for_nearby() -> None:
    """A store with the addresses of thousands of ranks is asked for a few."""
    asked = []

    def process_of(rank: int) -> tuple[str, int]:
        asked.append(rank)
        return (socket.gethostname() if rank >= 40 else "another", 1000 + rank)

    job = cast("Job", SimpleNamespace(rank=42, world_size=4096, process_of=process_of))
    assert neighbors(job) == {rank: 1000 + rank for rank in range(40, 51) if rank != 42}
    assert asked == [rank for rank in range(34, 51) if rank != 42]
