"""The hidden directory that a save of weights fills beside its target: one job's alone, until it has its name.

Whoever fills it holds a lock of the system on the directory itself, which ends with its process. So what a crashed save
left behind is removed by the next one, and what another job is filling is not: the second is refused, where it would
mix its files with those of the first.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from ..files.disk import make_directory, remove_tree
from .lock import DirectoryTaken

_TAKEN = (errno.EACCES, errno.EAGAIN)


class Staging:
    """An empty directory, made anew. DirectoryTaken while another save fills it."""

    def __init__(self, directory: Path, target: Path) -> None:
        self._target, self._lock = target, -1
        if directory.exists():
            try:
                self._hold(directory)
                remove_tree(directory)
            finally:
                self.release()
        try:
            make_directory(directory)
        except FileExistsError:  # by another job, since
            raise self._taken() from None
        self._hold(directory)

    def _hold(self, directory: Path) -> None:
        """Where a file system has no such locks, nobody is kept out."""
        try:
            self._lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_there = os.path.samestat(os.fstat(self._lock), directory.stat())
        except FileNotFoundError:
            is_there = False
        except OSError as error:
            is_there = error.errno not in _TAKEN
        if not is_there:  # or another job has replaced it, between its making and its lock
            self.release()
            raise self._taken()

    def _taken(self) -> DirectoryTaken:
        return DirectoryTaken(
            f"another save to {self._target} is under way, of another job or of another Booster: give each a path of "
            "its own, or wait for the other to end"
        )

    def release(self) -> None:
        if self._lock >= 0:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # children that were forked meanwhile hold it too
            os.close(self._lock)
            self._lock = -1
