"""Rows of files and datasets: a sequence of dicts that can be counted, or a stream of them."""

from __future__ import annotations

import glob
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.errors import nearest, nearest_file
from ..utils.versions import is_installed
from .errors import RecipeError
from .hub import why_not
from .lines import LINES, PACKED, LineFile, Lines, Placed, Row, Rows, kind_of, read_text
from .recipe import Data, Source
from .tasks import COLUMNS, Task

_TABLES = {".parquet": "parquet", ".csv": "csv"}
_KNOWN = (*LINES, ".json", *_TABLES)


class TableRows(Rows):
    """Rows of a table or a dataset, which is called `name`."""

    def __init__(self, table: Any, name: str) -> None:
        self.table, self.name = table, name

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Row:
        row: Row = self.table[index]
        return row

    def __iter__(self) -> Iterator[Row]:
        return iter(self.table)

    def place(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


class TableStream(Iterable[Row]):
    """The same of a table whose rows are not counted."""

    def __init__(self, table: Iterable[Row], name: str) -> None:
        self.table, self.name = table, name

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self.table, 1):
            yield Placed(row, f"{self.name}, row {number}")


class _OfParts(Rows):
    """Rows that are those of several sequences, each in its place there."""

    def _find(self, index: int) -> tuple[Any, int]:
        """The sequence that has the row, and which of its rows it is."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> Row:
        part, inner = self._find(index)
        row: Row = part[inner]
        return row

    def place(self, index: int) -> str:
        return place_of(*self._find(index))


class Joined(_OfParts):
    """Several sequences behind each other."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def _find(self, index: int) -> tuple[Any, int]:
        part = int(np.searchsorted(self.ends, index, side="right"))
        return self.parts[part], index - (int(self.ends[part - 1]) if part else 0)


class Mixture(_OfParts):
    """As many rows as the parts have together, of each as its weight says: small parts repeat, of large ones rows are
    left out, evenly from the first one to the last.

    Row i of part p comes around evenly between those of the others, so that a prefix has the shares of the whole.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        self.parts = parts
        total = sum(len(part) for part in parts)
        shares = np.asarray(weights) / sum(weights)
        counts = np.floor(shares * total).astype(np.int64)
        for extra in np.argsort(counts - shares * total)[: total - counts.sum()]:
            counts[extra] += 1
        part = np.repeat(np.arange(len(parts)), counts)
        inner = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort((inner + 0.5) / counts[part], kind="stable")
        rows = [self._rows(len(one), int(count)) for one, count in zip(parts, counts, strict=True)]
        self.part, self.inner = part[order], np.concatenate(rows)[order]

    @staticmethod
    def _rows(there: int, wanted: int) -> Any:
        """[wanted] numbers of rows, of `there`."""
        numbers = np.arange(wanted)
        return numbers * there // wanted if wanted < there else numbers % there

    def __len__(self) -> int:
        return len(self.part)

    def _find(self, index: int) -> tuple[Any, int]:
        part = self.parts[self.part[index]]
        return part, int(self.inner[index])


class MixedStream(Iterable[Row]):
    """Rows of streams, drawn by weight, the same at every pass; one that ends begins again until all have ended."""

    def __init__(self, parts: Sequence[Iterable[Row]], weights: Sequence[float], seed: int) -> None:
        self.parts, self.seed = parts, seed
        self.shares = np.asarray(weights) / sum(weights)

    def __iter__(self) -> Iterator[Row]:
        draws = np.random.default_rng(self.seed)
        running = [iter(part) for part in self.parts]
        ended = [False] * len(running)
        while True:
            at = int(draws.choice(len(running), p=self.shares))
            row = next(running[at], None)
            if row is None:
                ended[at] = True
                if all(ended):
                    return
                running[at] = iter(self.parts[at])
                row = next(running[at])
            yield row


class Picked(Rows):
    """The columns of rows that make a sample, under the names `text`, `messages`, `prompt`, `completion`."""

    def __init__(self, rows: Any, columns: Mapping[str, str]) -> None:
        self.rows, self.columns = rows, columns

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self._pick(self.rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(self._pick, self.rows)

    def _pick(self, row: Row) -> Row:
        return {part: row.get(column) for part, column in self.columns.items()}

    def place(self, index: int) -> str:
        return place_of(self.rows, index)


class PickedStream(Iterable[Row]):
    """The same of a stream."""

    def __init__(self, rows: Iterable[Row], columns: Mapping[str, str]) -> None:
        self.rows, self.columns = rows, columns

    def __iter__(self) -> Iterator[Row]:
        for number, row in enumerate(self.rows, 1):
            picked = {part: row.get(column) for part, column in self.columns.items()}
            yield Placed(picked, getattr(row, "place", f"row {number}"))


def place_of(rows: Any, index: int) -> str:
    """Where a row is, for people, of rows of any kind."""
    return str(rows.place(index)) if hasattr(rows, "place") else f"row {index + 1}"


def rows_of(data: Data, key: str, seed: int, task: Task) -> Rows | Iterable[Row]:
    """All rows that `data` names: a sequence, or a stream where it says streaming."""
    sources: list[Source] = data.mix if data.mix is not None else [data]
    names = [f"{key}.mix[{at}]" for at in range(len(sources))] if data.mix is not None else [key]
    parts = [_rows_of_source(source, name, task) for source, name in zip(sources, names, strict=True)]
    if len(parts) == 1:
        return parts[0]
    if sources[0].streaming:
        return MixedStream(parts, [float(source.weight or 0) for source in sources], seed)
    counted: list[Any] = parts
    weights = [
        float(len(part)) if source.weight is None else source.weight
        for part, source in zip(counted, sources, strict=True)
    ]
    mixture = Mixture(counted, weights)
    for at, source in enumerate(sources):
        if not (mixture.part == at).any():
            raise RecipeError(
                f"{names[at]}.weight={source.weight:g} comes to no sample of the {len(mixture)} of a pass; give more, "
                "or leave that source out"
            )
    return mixture


def _rows_of_source(source: Source, key: str, task: Task) -> Any:
    if source.dataset is None:
        rows = _of_files(source, key)
    else:
        rows = (TableStream if source.streaming else TableRows)(_of_dataset(source, key), source.dataset)
    first = next(iter(rows), None)
    if first is None:
        raise RecipeError(f"{key}: {source.path or source.dataset} has no rows; give a source with at least one")
    columns = _columns(first, source, key, task)
    for part in getattr(rows, "parts", ()):
        _check_first_row(part, columns, key)
    return PickedStream(rows, columns) if source.streaming else Picked(rows, columns)


def _check_first_row(file: Any, columns: Mapping[str, str], key: str) -> None:
    """That a file of several has the columns that are taken from them."""
    row = next(iter(file), None)
    lacking = [column for column in columns.values() if row is not None and column not in row]
    if row is not None and lacking:
        place = getattr(row, "place", None) or place_of(file, 0)
        raise RecipeError(
            f"{key}: {place} has no column {lacking[0]!r}, which other files have; it has {', '.join(row)}; make files "
            f"of each kind a source of {key}.mix"
        )


def _columns(first: Row, source: Source, key: str, task: Task) -> dict[str, str]:
    """What a sample of a task is made of, such as `prompt` and `completion` -> the column that holds it."""
    given = {part: column for part in COLUMNS if (column := getattr(source, part)) is not None}
    asked = [{part: given.get(part, part) for part in kind} for kind in task.kinds if given.keys() & {*kind}]
    found = [{part: part for part in kind} for kind in task.kinds if all(part in first for part in kind)]
    if not asked and not found:
        ways = ", or ".join(" and ".join(f"{part}: COLUMN" for part in kind) for kind in task.kinds)
        raise RecipeError(f"{key}: a row has the columns {', '.join(first)}; say which one holds the sample: {ways}")
    if not asked and len(found) > 1:
        both = " and ".join(next(iter(kind)) for kind in found)
        raise RecipeError(
            f"{key}: a row has the columns {both}; say which one holds the sample, such as text: text or messages: "
            "messages"
        )
    columns = (asked or found)[0]
    columns |= {part: given.get(part, part) for part in task.optional if part in given or part in first}
    for part, column in columns.items():
        if column not in first:
            raise RecipeError(
                f"{key}.{part}={column!r}: a row has no such column{nearest(column, first)}; it has {', '.join(first)}"
            )
    return columns


def _of_files(source: Source, key: str) -> Any:
    assert source.path is not None
    given = source.path if isinstance(source.path, list) else [source.path]
    paths = [found for one in given for found in _find(one, key)]
    if source.streaming:
        return _Chain(
            [Lines(path) if kind_of(path) in LINES else TableStream(_table(path, key), str(path)) for path in paths]
        )
    parts = [LineFile(path) if kind_of(path) in LINES else TableRows(_table(path, key), str(path)) for path in paths]
    kept = [part for part in parts if len(part)]
    return Joined(kept) if len(kept) > 1 else (kept or parts)[0]


class _Chain(Iterable[Row]):
    def __init__(self, parts: Sequence[Iterable[Row]]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Row]:
        for part in self.parts:
            yield from part


def _find(name: str, key: str) -> list[Path]:
    """Files of a path, a pattern or a directory, in order of their names; of a directory those that are not hidden."""
    path = Path(name)
    if path.is_dir():
        files = (one for one in path.rglob("*") if one.is_file() and not _is_hidden(one.relative_to(path)))
        # Of compressed files those that cannot be read are refused, not passed over: the data may be in them.
        found = sorted(one for one in files if kind_of(one) in _KNOWN)
        if not found:
            raise RecipeError(f"{key}.path={name}: the directory has no file that ends in {', '.join(_KNOWN)}")
    else:
        found = sorted(map(Path, glob.glob(name, recursive=True))) if not path.exists() else [path]
    if not found:
        raise RecipeError(f"{key}.path={name}: there is no such file{nearest_file(path, is_file=False)}")
    for one in found:
        _check_kind(one, key)
        if one.suffix in PACKED and one.with_suffix("") in found:
            raise RecipeError(
                f"{key}.path={name}: {one.with_suffix('')} is there unpacked and as {one.name}, and would be read "
                "twice; remove one of them, or name the files"
            )
    return found


def _check_kind(path: Path, key: str) -> None:
    kind = kind_of(path)
    if kind in _KNOWN and (path.suffix == kind or (path.suffix == ".gz" and kind not in _TABLES)):
        return
    packed = "; unpack it first" if path.suffix in PACKED else ""
    if packed and kind in (*LINES, ".json"):
        packed += ", or pack it by gzip (.gz)"
    raise RecipeError(f"{key}.path={path}: files that can be read end in {', '.join(_KNOWN)}{packed}")


def _is_hidden(path: Path) -> bool:
    """What an editor or a tool has left, such as .ipynb_checkpoints and .cache."""
    return any(part.startswith(".") for part in path.parts)


def _table(path: Path, key: str) -> Any:
    if kind_of(path) == ".json":
        try:
            rows = json.loads(read_text(path))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RecipeError(
                f"{path}: this is not JSON ({error}); a file with one object per line ends in .jsonl"
            ) from None
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise RecipeError(f'{path}: a list of objects is needed, such as [{{"text": "..."}}]')
        return rows
    datasets = _datasets(key)
    try:
        return datasets.load_dataset(_TABLES[path.suffix], data_files=str(path), split="train")
    except Exception as error:  # of many kinds: pandas', pyarrow's, its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = (str(cause).strip().split("\n") or [""])[0] or type(cause).__name__
        raise RecipeError(f"{path}: this cannot be read as {_TABLES[path.suffix]} ({first})") from error


def _of_dataset(source: Source, key: str) -> Any:
    datasets = _datasets(key)
    name = str(source.dataset)
    try:
        if (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists():
            found = datasets.load_from_disk(name)
            if source.name is not None:
                raise RecipeError(
                    f"{key}.name={source.name!r}: a directory that was saved has no configurations; leave it out"
                )
            if source.split != "train" and not isinstance(found, datasets.DatasetDict):
                raise RecipeError(f"{key}.split={source.split!r}: the directory {name} has one split; leave it out")
            if isinstance(found, datasets.DatasetDict):
                if source.split not in found:
                    raise RecipeError(
                        f"{key}.split={source.split!r} is not one of {', '.join(found)}{nearest(source.split, found)}"
                    )
                found = found[source.split]
            return found.to_iterable_dataset() if source.streaming else found
        return datasets.load_dataset(name, source.name, split=source.split, streaming=source.streaming)
    except RecipeError:
        raise
    except Exception as error:  # of many kinds: no such name, no network, another split
        first = str(error).strip().split("\n")[0]
        reason = why_not(error, name, "datasets/") or f"it cannot be loaded ({type(error).__name__}: {first})"
        raise RecipeError(f"{key}.dataset={name!r}: {reason}") from error


def _datasets(key: str) -> Any:
    if not is_installed("datasets"):
        raise RecipeError(f"{key} needs the package datasets: pip install datasets; or give a .jsonl file as path")
    return importlib.import_module("datasets")
