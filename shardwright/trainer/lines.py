"""Files with one row per line, as they are or packed by gzip."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from .errors import RecipeError

Row = Mapping[str, Any]
LINES = (".jsonl", ".ndjson", ".txt", ".text")
_JSON = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")


def kind_of(path: Path) -> str:
    """The suffix that says what is in a file: of a.jsonl.gz that is .jsonl."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


class Placed(dict[str, Any]):
    """A row of a stream, which knows where it is."""

    def __init__(self, row: Row, place: str) -> None:
        super().__init__(row)
        self.place = place


class Rows:
    """Rows that can be counted."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Row:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def place(self, index: int) -> str:
        """Where a row is, for people."""
        return f"row {index + 1}"


class LineFile(Rows):
    """Rows of a file, read when they are asked for. Empty lines are none.

    Only where each line begins is kept, 8 bytes a line, and as much for its number where a file has empty lines; and
    all of a file that is packed, in which no line can be found without those before it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.content: bytes | None = None
        if path.suffix == ".gz":
            with _opened(path) as packed:
                self.content = packed.read()
        starts, numbers, position = [], [], 0
        with self._lines() as lines:
            for number, line in enumerate(lines, 1):
                if not _is_empty(line):
                    starts.append(position)
                    numbers.append(number)
                position += len(line)
        self.starts = np.asarray(starts, dtype=np.int64)
        self.numbers = np.asarray(numbers, dtype=np.int64) if numbers and numbers[-1] != len(numbers) else None

    def _lines(self) -> IO[bytes]:
        return self.path.open("rb") if self.content is None else io.BytesIO(self.content)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Row:
        with self._lines() as lines:
            lines.seek(int(self.starts[index]))
            return _parse(lines.readline(), self.path, self.place(index))

    def __iter__(self) -> Iterator[Row]:
        return iter(Lines(self.path))

    def place(self, index: int) -> str:
        return f"{self.path}:{index + 1 if self.numbers is None else self.numbers[index]}"


class Lines(Iterable[Row]):
    """The same of a stream, each row with its place, without looking for where each begins."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Row]:
        with _opened(self.path) as lines:
            for number, line in enumerate(lines, 1):
                if not _is_empty(line):
                    place = f"{self.path}:{number}"
                    yield Placed(_parse(line, self.path, place), place)


def read_text(path: Path) -> str:
    """All of a file."""
    with _opened(path) as file:
        return file.read().decode()


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    """The bytes of a file, unpacked."""
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield file
        return
    try:
        with gzip.open(path, "rb") as packed:
            yield cast("IO[bytes]", packed)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RecipeError(f"{path}: this cannot be unpacked by gzip ({error})") from None


def _is_empty(line: bytes) -> bool:
    return not line.removeprefix(codecs.BOM_UTF8).strip()


def _parse(line: bytes, path: Path, place: str) -> Row:
    """The row of a line."""
    try:
        text = line.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError:
        raise RecipeError(f"{place}: this is not UTF-8 text") from None
    if kind_of(path) not in _JSON:
        return {"text": text.rstrip("\r\n")}
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecipeError(f"{place}: this is not JSON ({error})") from None
    if not isinstance(row, dict):
        raise RecipeError(f'{place}: a row is a JSON object, such as {{"text": "..."}}')
    return row
