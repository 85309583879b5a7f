"""`shardwright config`: every key of a configuration is read or named, and what is written is taken by its reader."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwright.cli import config as command
from shardwright.cli.main import main
from shardwright.compat.configs import SOURCES, TARGETS, read_file, write
from shardwright.compat.configs.literals import read_assignments
from shardwright.plugins.hybrid.config_form import read_config
from shardwright.trainer import build_recipe
from tests.compat.config_files import CASES, Case

NEEDED = {"model": "gpt2", "data": {"path": "a.jsonl"}}


def written(case: Case, tmp_path: Path) -> Path:
    path = tmp_path / case.file
    path.write_text(case.text)
    return path


@pytest.mark.parametrize("case", CASES, ids=[case.file for case in CASES])
def test_every_key_is_read_or_named(case: Case, tmp_path: Path) -> None:
    source, found = read_file(written(case, tmp_path))
    assert source == case.source
    assert found.layout == case.layout
    assert found.recipe == case.recipe
    assert sorted(note.key for note in found.notes) == sorted(case.noted)
    data = {**NEEDED["data"], **found.recipe.get("data", {})}  # type: ignore[dict-item]
    recipe = build_recipe({**found.recipe, **NEEDED, "data": data, "layout": found.layout})
    assert recipe.layout == case.layout


@pytest.mark.parametrize("case", CASES, ids=[case.file for case in CASES])
@pytest.mark.parametrize("target", TARGETS)
def test_every_target(case: Case, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(written(case, tmp_path)), "--to", target]) == 0
    text = capsys.readouterr().out
    if target == "shardwright":
        read = yaml.safe_load(text)
        assert read.pop("layout") == case.layout
        assert read == case.recipe
        assert all(key in text for key in case.noted)
    elif target == "plugin":
        (call,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assign)]
        assert {"precision"} <= {each.arg for each in call.value.keywords}  # type: ignore[attr-defined]
    elif target == "from_config":
        found = read_config(read_assignments(text, "x.py")[0]).arguments
        kept = {name: found[name] for name in ("tp_size", "pp_size", "num_model_chunks") if name in case.layout}
        assert kept == {name: case.layout[name] for name in kept}
        assert (found["zero_stage"] == 3) == (case.layout.get("zero_stage") == 3)
    elif target == "deepspeed":
        assert json.loads(text)["zero_optimization"]["stage"] == case.layout.get("zero_stage", 0)


def test_a_recipe_of_deepspeed_keys_goes_there_and_back(tmp_path: Path) -> None:
    recipe = {"learning_rate": 1e-3, "bf16": True, "gradient_accumulation_steps": 2, "adam_beta2": 0.95, "seed": 3}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**recipe, "layout": {"zero_stage": 3, "cpu_offload": True}}))
    text, notes = write(read_file(path)[1], "deepspeed")
    assert [note.key for note in notes] == ["seed"]
    (tmp_path / "back.json").write_text(text)
    back = read_file(tmp_path / "back.json")[1]
    assert back.layout == {"zero_stage": 3, "cpu_offload": True}
    recipe.pop("seed")
    assert back.recipe == {**recipe, "adam_beta1": 0.9, "optim": "adamw_torch"}


def test_accelerate_takes_what_is_written_for_it(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path = tmp_path / "recipe.yaml"
    path.write_text("nproc: 4\nbf16: true\nlayout: {zero_stage: 3, tp_size: 2}\n")
    text, notes = write(read_file(path)[1], "accelerate")
    assert notes == []
    (tmp_path / "accelerate.yaml").write_text(text)
    loaded = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert (loaded.num_processes, loaded.mixed_precision, loaded.distributed_type) == (4, "bf16", "FSDP")
    back = read_file(tmp_path / "accelerate.yaml")[1]
    assert back.layout == {"zero_stage": 3, "tp_size": 2}


WRONG: list[tuple[str, str, list[str], str]] = [
    ("a.json", "{", [], "a.json, line 1: this is not JSON"),
    ("a.yaml", "a: [", [], "this is not YAML"),
    ("a.yaml", "- 1", [], "a configuration is a mapping of keys, not a list"),
    ("a.yaml", "some: thing", [], "say --from colossalai or internlm"),
    ("a.py", "x = (", [], "line 1: this is not python"),
    ("a.py", "x = 1", ["--from", "colossalai"], "builds none of HybridParallelPlugin"),
    ("a.py", "parallel = dict(tensor='2')", [], "parallel.tensor='2' must be a whole number"),
    ("a.json", '{"zero_optimization": {"reduce_bucket_size": "big"}}', [], "reduce_bucket_size = 'big' is no value"),
    ("a.sh", "echo hello", [], "no options such as --plugin 3d"),
]


@pytest.mark.parametrize(("file", "text", "options", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_what_cannot_be_read(
    file: str, text: str, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text(text)
    assert main(["config", str(tmp_path / file), *options]) == 2
    said: Any = capsys.readouterr()
    assert words in said.err
    assert said.out == ""


def test_python_files_are_not_run(tmp_path: Path) -> None:
    text = "import os\nos.remove('x')\nA = 9**9**9\nB = __import__('os')\nC = [1] * 10**9\nD = 2**3 + 1\nE = f'{D}b'\n"
    values, unread = read_assignments(text, "a.py")
    assert values == {"D": 9, "E": "9b"}
    assert [name for name, _ in unread] == ["A", "B", "C"]


def test_the_command_offers_what_there_is() -> None:
    """It lists them itself, so that `--help` imports nothing."""
    assert (command.SOURCES, command.TARGETS) == (SOURCES, TARGETS)
