"""Every operation that changes what is on disk, so that all of them can be made durable, checksummed, and made to fail
in tests.

Order is what makes a save safe: data is written and fsynced, then the directory that names it, then the marker that
says the rest is there. A test installs a probe that is called before (and, for writes, in the middle of) each operation
and may kill the process or raise there.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

Probe = Callable[[str, Path], None]

_PARALLEL = 1 << 20  # bytes from which on a checksum is worth a thread
_PIECE = 16 << 20  # bytes per system call
_probe: Probe | None = None


def set_probe(probe: Probe | None) -> None:
    """Call `probe(operation, path)` at every operation from now on; None for none."""
    global _probe
    _probe = probe


def _at(operation: str, path: Path) -> None:
    if _probe is not None:
        _probe(operation, path)


class OutputFile:
    """A new file, written front to back; `crc` and `size` describe what was written. Leaving the context makes it
    durable.
    """

    def __init__(self, path: Path) -> None:
        _at("create", path)
        self.path = path
        self.size = 0
        self.crc = 0
        # O_EXCL also refuses to follow a link that someone placed under the name.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._pool: ThreadPoolExecutor | None = None

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            self._write_piece(view[start : start + _PIECE])

    def _write_piece(self, piece: memoryview) -> None:
        _at("write", self.path)
        # both release the interpreter's lock: the checksum is computed while the piece is written
        if len(piece) >= _PARALLEL:
            self._pool = self._pool or ThreadPoolExecutor(1, "checksum")
            checksum = self._pool.submit(zlib.crc32, piece, self.crc)
            self._put(piece)
            self.crc = checksum.result()
        else:
            self.crc = zlib.crc32(piece, self.crc)
            self._put(piece)
        self.size += len(piece)

    def _put(self, piece: memoryview) -> None:
        if _probe is not None and len(piece) > 1:
            half = len(piece) // 2
            self._put_all(piece[:half])
            _at("half-way write", self.path)
            piece = piece[half:]
        self._put_all(piece)

    def _put_all(self, piece: memoryview) -> None:
        with _named(self.path):
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        try:
            if kind is None:
                _at("fsync", self.path)
                with _named(self.path):
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of a descriptor, which knows no name, says which file it was."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_file(path: Path, data: bytes) -> tuple[int, int]:
    """A whole small file; returns (size, crc)."""
    with OutputFile(path) as file:
        file.write(data)
    return file.size, file.crc


def make_directory(path: Path) -> None:
    _at("mkdir", path)
    path.mkdir(parents=True)


def rename(source: Path, target: Path) -> None:
    _at("rename", source)
    os.rename(source, target)


def sync_directory(path: Path) -> None:
    """Make the names in `path` durable."""
    _at("fsync", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    _at("remove", path)
    shutil.rmtree(path)


def crc_of(path: Path) -> int:
    """The checksum of a file's contents."""
    crc = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return crc
