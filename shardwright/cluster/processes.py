"""What the system says of processes of this machine."""

from __future__ import annotations

import socket


def is_running(host: str, pid: int) -> bool:
    """Whether a process of this machine runs, and does not only wait to be buried."""
    if host != socket.gethostname():
        return False
    try:
        return stat(pid)[0] not in "ZX"
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine has been stopped by a signal."""
    try:
        return stat(pid)[0] in "Tt"
    except OSError:
        return False


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third one on, which is the state; OSError of no process."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()
