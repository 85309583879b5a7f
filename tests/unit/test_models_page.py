"""What the package says of models: the page, and the command that prints it or checks a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright.cli.main import main
from shardwright.models.verified import OUTCOMES, load
from shardwright.testing.matrix.axes import AXES, GROUPS, pick_axes
from shardwright.testing.matrix.check import find
from shardwright.testing.matrix.check import main as check
from tests.models.matrix.write import PAGE, page, write_data


def test_the_page_is_what_the_data_give() -> None:
    assert PAGE.read_text() == page(load()), "run python -m tests.models.matrix --write"


def test_data_name_axes_and_outcomes_that_exist() -> None:
    found = load()
    assert {name for name, _, group in found.axes} <= AXES.keys()
    assert dict(found.groups) == GROUPS
    for row in found.rows:
        assert row.cells.keys() <= AXES.keys()
        assert all(cell.outcome in OUTCOMES for cell in row.cells.values()), row.model_class
        assert all(cell.why or cell.outcome == "verified" for cell in row.cells.values()), row.model_class


def test_written_data_are_read_back(tmp_path: Path) -> None:
    row = {"family": "F", "model_type": "t", "model_class": "C", "first": True, "seconds": 1.0}
    cells = [
        {**row, "axis": "pp2", "outcome": "refused", "why": "too | short"},
        {**row, "axis": "tp2", "outcome": "verified", "why": "", "share": 0.5, "whole": ["a.b"]},
        {**row, "axis": "zbv", "outcome": "refused", "why": "too | short"},
    ]
    write_data(cells, tmp_path / "data.json")
    (found,) = load(tmp_path / "data.json").rows
    assert list(found.cells) == ["tp2", "pp2", "zbv"]
    assert (found.cells["zbv"].outcome, found.cells["zbv"].why) == ("refused", "too | short")
    assert (found.share, found.whole) == (0.5, ("a.b",))
    shown = page(load(tmp_path / "data.json"))
    assert "| F | C | yes | no (1) |  | no (1) |" in shown
    assert "| t | C | yes | 50% | `a.b` | no (1) |" in shown
    assert shown.endswith("1. too / short\n")


def test_models_are_listed_without_torch() -> None:
    code = (
        "import sys; from shardwright.cli.main import main; status = main(['models', '--family', 'llama']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "LlamaForCausalLM" in done.stdout
    assert "OPTForCausalLM" not in done.stdout


def test_json_has_every_reason_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json", "--family", "llama"]) == 0
    found = json.loads(capsys.readouterr().out)
    first = next(row for row in found["models"] if row["model_class"] == "LlamaForCausalLM")
    assert first["axes"]["tp2"] == {"outcome": "verified"}
    assert found["versions"]["transformers"]


def test_no_model_of_that_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--family", "no such"]) == 2
    assert "models --check NAME" in capsys.readouterr().err
    for name, near in (("lama", "'llama'"), ("LlamaForCausal", "'LlamaForCausalLM'"), ("gone.py:tiny", "gone.py")):
        assert check([name]) == 2
        assert near in capsys.readouterr().err
    assert check(["llama", "--axes", "tq"]) == 2
    assert "axis 'tq' is not one of" in capsys.readouterr().err


def test_names_that_stand_for_a_class(tmp_path: Path) -> None:
    assert find("bert").model_class == "BertForMaskedLM" or find("bert").model_class == "BertLMHeadModel"
    assert find("vit").model_class == "ViTForImageClassification"
    assert find("T5EncoderModel").model_class == "T5EncoderModel"
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForTokenClassification"]}')
    assert find(str(tmp_path)).model_class == "Qwen3ForTokenClassification"
    assert [axis.name for axis in pick_axes(["sp", "tp", "tp2"])] == ["split_gather", "all_to_all", "tp2"]


def test_a_model_is_checked_on_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(["qwen2", "--axes", "tp,all_to_all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["tp2", "verified"], ["all_to_all", "verified"]]
