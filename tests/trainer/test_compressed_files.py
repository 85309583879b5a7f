"""Files of rows that gzip packed are read as they are unpacked; what cannot be read is refused by name."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwright.trainer import RecipeError
from shardwright.trainer.recipe import Data
from shardwright.trainer.sources import place_of, rows_of
from shardwright.trainer.tasks import TASKS

# a mark of the encoding, empty lines, the end of a line as Windows has it, no end behind the last
LINES = (
    b"\xef\xbb\xbf"
    + b"\n\n".join(json.dumps({"text": f"row {at}"}).encode() for at in range(9))
    + b'\r\n{"text": "end"}'
)
CONTENTS = {
    ".jsonl": LINES,
    ".txt": b"one\n\ntwo\r\nthree",
    ".json": json.dumps([{"text": "a"}, {"text": "b"}]).encode(),
}


def read(path: str | list[str], streaming: bool = False) -> Any:
    return rows_of(Data(path=path, streaming=streaming), "data", 0, TASKS["causal-lm"])


@pytest.mark.parametrize("suffix", CONTENTS)
def test_packed_rows_are_those_of_the_plain_file(suffix: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain" / f"a{suffix}", tmp_path / "packed" / f"a{suffix}.gz"
    for path in (plain, packed):
        path.parent.mkdir()
    plain.write_bytes(CONTENTS[suffix])
    # two members, as appending to a packed file leaves them
    half = len(CONTENTS[suffix]) // 2
    packed.write_bytes(gzip.compress(CONTENTS[suffix][:half]) + gzip.compress(CONTENTS[suffix][half:]))
    one, other = read(str(plain)), read(str(packed))
    assert len(one) == len(other) > 1
    for at in (0, len(one) - 1, 1):
        assert one[at] == other[at]
        name = place_of(one, at).replace(str(plain), str(packed))
        assert place_of(other, at) == name
    copied = pickle.loads(pickle.dumps(other))  # as workers have it
    assert [*one] == [*other] == [*copied] == [*read(str(packed), streaming=True)]
    assert [*read(str(packed.parent))] == [*one]
    assert [*read([str(plain), str(packed)])] == [*one, *one]


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "whole.jsonl.gz").write_bytes(gzip.compress(LINES))
    cut = {"cut.jsonl.gz": gzip.compress(LINES)[:-20], "none.jsonl.gz": LINES, "none.json.gz": b"\x1f\x8b\x08 what"}
    refused = {
        **dict.fromkeys(("a.jsonl.zst", "a.json.bz2"), "unpack it first, or pack it by gzip (.gz)"),
        "a.parquet.gz": "files that can be read end in",
        "a.zip": "unpack it first",
    }
    for name, content in {**cut, **dict.fromkeys(refused, b"")}.items():
        (tmp_path / name).write_bytes(content)
        for streaming in (False, True):
            with pytest.raises(RecipeError) as caught:
                [*read(str(tmp_path / name), streaming)]
            assert refused.get(name, "this cannot be unpacked by gzip (") in str(caught.value)
            assert name in str(caught.value)


def test_a_directory_is_read_once_and_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "notes.md").write_text("no data")
    assert len(read(str(tmp_path))) == 10
    (tmp_path / "b.jsonl.zst").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"b\.jsonl\.zst: files that can be read"):
        read(str(tmp_path))
    (tmp_path / "b.jsonl.zst").unlink()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    for path in (tmp_path, tmp_path / "a*"):
        with pytest.raises(RecipeError, match=r"is there unpacked and as a\.jsonl\.gz, and would be read twice"):
            read(str(path))
