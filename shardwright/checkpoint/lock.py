"""Two jobs must not save to one directory: each would remove what the other has written.

The rank that publishes holds a lock of the system on bytes of one file, `.shardwright-lock`, beside the checkpoints:
the byte that a checkpoint's name stands for, and where old checkpoints are removed all bytes. The system lets go of
them when the process ends, however it ends, so a crash leaves no lock behind; children of the process do not hold them.
Jobs that save under different names in one directory, and remove nothing, do not meet.

Where a file system has no such locks, or the file is another user's, the log says so once and nothing is locked: what
is wrong with a directory is said by the save itself.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import zlib
from pathlib import Path

from ..logging import get_dist_logger

NAME = ".shardwright-lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_HEADER = 4096  # bytes in which holders say who they are; locked bytes lie behind, where nothing is written
_held: dict[Path, int] = {}  # descriptors by directory; to close one would free all of its locks
_process = 0  # that opened them


class DirectoryTaken(ValueError):
    """Another job that is still running saves to this directory."""


def lock(target: Path, whole: bool) -> None:
    """Keep other jobs from saving to `target`, with `whole` from saving anywhere beside it, until this process ends."""
    directory = target.parent.resolve()
    length, start = (0, _HEADER) if whole else (1, _HEADER + zlib.crc32(target.name.encode()))
    try:
        descriptor = _opened(directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{directory / NAME} is a link, which saves do not follow: remove it") from None
        _say_unlocked(directory, error)
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in _TAKEN:
            raise DirectoryTaken(
                f"another job that is still running saves to {directory} ({_holder(descriptor)}): give this one a "
                "directory of its own, or end the other first. If that machine has crashed and the file system does "
                f"not know it yet, remove {directory / NAME}"
            ) from None
        _say_unlocked(directory, error)
        return
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode().ljust(200), 0)


def _opened(directory: Path) -> int:
    """A descriptor of the directory's file of locks, which stays open."""
    global _process
    if _process != os.getpid():  # a forked child holds none of its parent's locks
        _held.clear()
        _process = os.getpid()
    file = directory / NAME
    if directory in _held and not (file.exists() and os.path.samestat(os.fstat(_held[directory]), file.stat())):
        os.close(_held.pop(directory))  # the directory was removed and made anew: what is left keeps no one out
    if directory not in _held:
        _held[directory] = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    return _held[directory]


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "it has not said which"


_said: set[Path] = set()


def _say_unlocked(directory: Path, error: OSError) -> None:
    if directory not in _said:
        _said.add(directory)
        get_dist_logger().warning(
            f"{directory / NAME} cannot be locked ({error.strerror}): nothing keeps another job from saving there"
        )
