"""Two jobs must not save to one directory: each would remove what the other has written.

The rank that publishes holds a lock of the system on bytes of one file, `.shardwright-lock`, beside the checkpoints:
the byte that a checkpoint's name stands for, and all bytes where old checkpoints are removed or the directory is a
run's own (`claim`, which finds the other job before the first step). The system lets go of them when the process ends,
however it ends, so a crash leaves no lock behind; children of the process do not hold them. Jobs that save under
different names in one directory, and remove nothing, do not meet.

Where a file system has no such locks, who holds the directory is what the file says: a process of this machine that
runs, known by the time at which it started, keeps others out. Others, and where the file is another user's, nothing
does, and the log says so once: what is wrong with a directory is said by the save itself.

A process loses all locks of a file when it closes any descriptor of it, as a script does that copies or uploads its
run's directory. What the file says keeps others of the machine from all of the directory then, too, until the next save
takes the lock again. It says which file it is: a copy of it claims nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from stat import S_ISREG

import torch.distributed as dist

from ..cluster.processes import is_running, stat
from ..logging import get_dist_logger
from .agreement import Agreement, attempt

NAME = ".shardwright-lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_HEADER = 4096  # bytes in which holders say who they are; locked bytes lie behind, where nothing is written
_WORDS = 250  # bytes of these
_HOLDER = re.compile(
    r"(?P<who>process (?P<pid>\d{1,10}) on (?P<host>.*), started at (?P<started>\d+)), file (?P<file>\d+)"
)
_held: dict[Path, int] = {}  # descriptors by directory; to close one would free all of its locks
_own: set[Path] = set()  # of these directories those in which this process keeps others from something
_process = 0  # that opened them


class DirectoryTaken(ValueError):
    """Another job that is still running saves to this directory."""


def claim(*directories: Path) -> None:
    """Keep other jobs from all of these directories, which are made, until this one ends. All ranks must call;
    DirectoryTaken on all of them. A directory that cannot be made costs what is saved there, later.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    _, error = attempt(lambda: _claim_all(directories if rank == 0 else ()))
    told = None if error is None else [isinstance(error, DirectoryTaken), str(error)]
    told = Agreement(ranks).broadcast(told)
    if told is not None:  # the same on all ranks, so that whichever is heard first says what is wrong
        is_taken, words = told
        raise (DirectoryTaken if is_taken else ValueError)(words)


def require_free(directory: Path) -> None:
    """DirectoryTaken where another job has claimed `directory`; of a process that is not to keep it itself."""
    here = directory.resolve()
    if not here.is_dir() or here in _own:
        return
    try:
        _claim(here)
        if here in _own:
            _say_holder(_held[here], "")
    finally:
        _own.discard(here)
        if here in _held:
            os.close(_held.pop(here))


def _claim_all(directories: Iterable[Path]) -> None:
    for directory in directories:
        _claim(directory)


def _claim(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _say_unlocked(directory, error)
        return
    lock(directory / "all", whole=True)


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
    holder = _holder(descriptor)
    other_runs = _is_another_that_runs(holder, descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
    except OSError as error:
        if error.errno in _TAKEN or other_runs:
            raise _taken(directory, holder) from None
        _say_unlocked(directory, error, "a job of another machine")
    if whole and other_runs:
        fcntl.lockf(descriptor, fcntl.LOCK_UN, length, start)
        raise _taken(directory, holder)
    _own.add(directory)
    me, file = os.getpid(), os.fstat(descriptor).st_ino
    _say_holder(descriptor, f"process {me} on {socket.gethostname()}, started at {_started(me)}, file {file}")


def _taken(directory: Path, holder: str) -> DirectoryTaken:
    found = _HOLDER.fullmatch(holder)
    return DirectoryTaken(
        f"another job that is still running saves to {directory} ({holder if found is None else found['who']}): give "
        "this one a directory of its own, or end the other first. If that machine has crashed and the file system does "
        f"not know it yet, remove {directory / NAME}"
    )


def _say_holder(descriptor: int, words: str) -> None:
    with suppress(OSError):  # a full disk: the lock holds without a name
        os.pwrite(descriptor, words.encode().ljust(_WORDS), 0)


def _opened(directory: Path) -> int:
    """A descriptor of the directory's file of locks, which stays open."""
    global _process
    if _process != os.getpid():  # a forked child holds none of its parent's locks
        _held.clear()
        _own.clear()
        _process = os.getpid()
    file = directory / NAME
    if directory in _held and not (file.exists() and os.path.samestat(os.fstat(_held[directory]), file.stat())):
        _own.discard(directory)
        os.close(_held.pop(directory))  # the directory was removed and made anew: what is left keeps no one out
    if directory not in _held:
        # without waiting, as a device may let who opens it
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file, flags, 0o644)
        if not S_ISREG(os.fstat(descriptor).st_mode):  # a pipe: who holds it cannot be read twice
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no plain file", str(file))
        _held[directory] = descriptor
    return _held[directory]


def _holder(descriptor: int) -> str:
    said = os.pread(descriptor, _WORDS, 0).decode(errors="replace").strip("\0 \n")
    return said or "it has not said which"


def _is_another_that_runs(holder: str, descriptor: int) -> bool:
    """Whether these words of a holder of this file are of a process of this machine that has not ended, and is not
    this one.
    """
    found = _HOLDER.fullmatch(holder)
    if found is None or int(found["pid"]) == os.getpid() or int(found["file"]) != os.fstat(descriptor).st_ino:
        return False
    pid = int(found["pid"])
    return is_running(found["host"], pid) and _started(pid) == found["started"]


def _started(pid: int) -> str:
    """When a process of this machine started, in ticks since the machine did; "" of none, which no process has."""
    try:
        return stat(pid)[19]
    except OSError:
        return ""


_said: set[Path] = set()


def _say_unlocked(directory: Path, error: OSError, whom: str = "another job") -> None:
    if directory not in _said:
        _said.add(directory)
        get_dist_logger().warning(
            f"{directory / NAME} cannot be locked ({error.strerror}): nothing keeps {whom} from saving there"
        )
