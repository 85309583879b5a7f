"""A row that is wrong in the middle of a run is named by file and line, however it is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_files import recipe
from torch.utils.data import DataLoader

from shardwright.trainer import RecipeError, build_recipe
from shardwright.trainer.build import prepare
from shardwright.trainer.errors import RowError

BAD = {"null": '{"text": null}', "not JSON": '{"text": ', "not UTF-8": b'{"text": "\xff"}'}


def write_rows(path: Path, bad: str | bytes, at: int) -> None:
    """200 lines, every tenth empty; the bad one is line `at`."""
    lines = [b"" if number % 10 == 0 else json.dumps({"text": f"row {number}"}).encode() for number in range(1, 201)]
    lines[at - 1] = bad.encode() if isinstance(bad, str) else bad
    path.write_bytes(b"\n".join(lines) + b"\n")


def sources(folder: Path, mixed: bool, bad: str | bytes) -> dict[str, Any]:
    write_rows(folder / "one.jsonl", '{"text": "as the others"}', 5)
    write_rows(folder / "two.jsonl", bad, 177)
    if mixed:
        return {"mix": [{"path": str(folder / name), "weight": 1} for name in ("one.jsonl", "two.jsonl")]}
    return {"path": [str(folder / "one.jsonl"), str(folder / "two.jsonl")]}


def read_to_the_end(loader: DataLoader[Any]) -> None:
    """Workers end with it: those of an iterator that failed are waited for, five seconds each, when it is collected."""
    batches: Any = iter(loader)
    try:
        for _ in batches:
            pass
    finally:
        if loader.num_workers:
            batches._shutdown_workers()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mixed", [False, True], ids=["joined", "mixed"])
@pytest.mark.parametrize("streaming", [False, True], ids=["counted", "streaming"])
@pytest.mark.parametrize("packing", [False, True], ids=["alone", "packed"])
def test_a_bad_line_is_named(tmp_path: Path, packing: bool, streaming: bool, mixed: bool, workers: int) -> None:
    for name, bad in list(BAD.items())[: 1 if workers else 3]:
        data = {**sources(tmp_path, mixed, bad), "packing": packing, "max_length": 64}
        if mixed:
            data["mix"] = [{**one, "streaming": streaming} for one in data["mix"]]
        else:
            data["streaming"] = streaming
        parts = prepare(build_recipe(recipe(tmp_path, data=data)))
        at_start = packing and not streaming  # where all rows are read before the first step, by every rank
        with pytest.raises(RecipeError if at_start else RowError) as caught:
            read_to_the_end(DataLoader(parts.dataset("data"), 4, num_workers=workers, collate_fn=parts.collate("data")))
        said = str(caught.value).strip().rpartition("RowError: ")[2]
        assert said.startswith(f"{tmp_path / 'two.jsonl'}:177: "), (name, said)
        assert said.count("177") == 1
        assert "\n" not in said


def test_rows_of_tables_are_named(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(99)] + [{"text": None}]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    for streaming in (False, True):
        data = {"path": str(tmp_path / "t.json"), "streaming": streaming}
        parts = prepare(build_recipe(recipe(tmp_path, data=data)))
        with pytest.raises(RowError, match=r"t\.json, row 100: a row's text is None"):
            list(DataLoader(parts.dataset("data"), None))


@pytest.mark.parametrize("streaming", [False, True], ids=["counted", "streaming"])
def test_a_run_on_two_ranks_says_it_once(tmp_path: Path, streaming: bool) -> None:
    data = {**sources(tmp_path, False, BAD["null"]), "streaming": streaming, "max_length": 32}
    given = recipe(tmp_path, data=data, nproc=2, max_steps=400, dataloader_num_workers=1, save_strategy="no")
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(given))
    done = subprocess.run(
        [sys.executable, "-m", "shardwright.cli", "train", str(tmp_path / "r.yaml")], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "shardwright train:" in line]
    assert len(lines) == 1, done.stderr[-3000:]
    assert lines[0].endswith(f"{tmp_path / 'two.jsonl'}:177: a row's text is None; text is needed")
