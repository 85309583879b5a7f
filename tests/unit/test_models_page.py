"""What the package says of models: the page, and the command that prints it or checks a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.models.verified import OUTCOMES, load
from shardwright.testing.matrix.axes import AXES, GROUPS, pick_axes
from shardwright.testing.matrix.check import find
from shardwright.testing.matrix.check import main as check
from tests.models.matrix.data import write_data
from tests.models.matrix.page import PAGE, page
from tests.models.matrix.reasons import reason_of


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
    row = {"family": "F", "model_type": "t", "model_class": "BertForMaskedLM", "first": True, "seconds": 1.0}
    cells: list[dict[str, Any]] = [
        {**row, "axis": "pp2", "outcome": "refused", "why": "too | short"},
        {**row, "axis": "tp2", "outcome": "verified", "why": "", "share": 0.5, "whole": ["a.b"], "steps": 2},
        {**row, "axis": "fp32", "outcome": "verified", "why": ""},
        {**row, "axis": "zbv", "outcome": "refused", "why": "too | short"},
        {**row, "axis": "jit", "outcome": "verified", "why": "", "steps": 2},
        {**row, "axis": "fused_norm", "outcome": "failed", "why": "BertForMaskedLM ended"},
        {**row, "axis": "ep2", "outcome": "not applicable", "why": "the class has no experts"},
        {**row, "axis": "lazy", "outcome": "not built", "why": "no batch"},
        {**row, "axis": "generate", "outcome": "verified", "why": ""},
    ]
    for number, (one, tp2) in enumerate([(10.0, 20.0), (10.0, 20.0), (10.0, 31.0)]):
        times = {"one": [one, 50.0], "tp2": [tp2, 60.0]}
        timed = {**row, "model_class": "BertForMaskedLM" if not number else f"Other{number}"}
        cells.append({**timed, "axis": "times", "outcome": "timed", "why": "", "times": times})
    write_data(cells, tmp_path / "data.json")
    data = load(tmp_path / "data.json")
    found = data.rows[0]
    assert list(found.cells) == ["tp2", "pp2", "zbv", "ep2", "fp32", "jit", "fused_norm", "lazy", "generate"]
    assert (found.cells["zbv"].outcome, found.cells["zbv"].why) == ("refused", "too | short")
    assert (found.share, found.whole, found.kinds) == (0.5, ("a.b",), ("masked LM",))
    assert (found.times["tp2"], data.one_step) == ((20.0, 60.0), 1)
    later = {**cells[0], "outcome": "verified", "why": "", "steps": 2}
    write_data([later], tmp_path / "data.json")
    again = load(tmp_path / "data.json")
    assert again.rows[0].cells["pp2"].outcome == "verified"
    assert again.rows[1:] == data.rows[1:]
    assert {**again.rows[0].cells, "pp2": found.cells["pp2"]} == found.cells
    shown = page(data).splitlines()
    name = "BertForMaskedLM"
    for line in (
        f"| F | {name} | 50% | yes | no (1) |  | - |  | all but fused norm (2) |  | all but lazy (3) |",
        f"| F | {name} | yes | no (1) |  | no (1) |  | - |  | yes |",
        f"| F | {name} | 10.0 | 20.0 | 2.0 |  |  |",
        "| F | Other2 | 10.0 | 31.0 | 3.1 **slow** |  |  |",
        "| masked LM | 1 | 1 of 1 (100%) | 1 of 1 (100%) | 0 of 1 (0%) | 0 of 1 (0%) |  |  |  |  |",
        f"| 1F1B refused | 1 | {name} |",
        f"| t | {name} | yes | 50% | `a.b` | no (1) |",
        f"| F | {name} | 50% | `a.b` | no way to deal it is known |",
        "1. too / short",
        "2. the model ended",
        "3. no batch",
    ):
        assert line in shown, line


def test_reasons_for_what_stays_whole() -> None:
    assert "convolution" in reason_of("model.encoder.conv2.weight")
    assert "positions" in reason_of("model.decoder.embed_positions.weight")
    assert "pixels" in reason_of("vision_encoder.patch_embed.projection.weight")
    assert reason_of("model.layers.*.mlp.up_proj.weight") == "no way to deal it is known"


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


def test_texts_filter_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Families, types and classes, however a name is spelled; with several texts those that have all of them."""
    rows = load().rows

    def listed(*texts: str) -> set[str]:
        assert main(["models", *texts, "--json"]) == 0
        return {row["model_class"] for row in json.loads(capsys.readouterr().out)["models"]}

    assert listed() == {row.model_class for row in rows}
    assert "GPT2LMHeadModel" in listed("GPT-2") == listed("gpt2") == listed("--family", "gpt 2")
    moe = listed("qwen3", "MoE")
    assert moe
    assert moe == listed("--family", "moe", "qwen3") < listed("qwen3")
    assert all("moe" in name.lower() for name in moe)
    assert main(["models", "opt-for-causal"]) == 0
    assert "OPTForCausalLM" in capsys.readouterr().out


WRONG = [
    (["lamma"], "near are llama"),
    (["lamma", "--json"], "near are llama"),
    (["qwen3moee"], "qwen3_moe"),
    (["llama", "zzzzz"], "llama alone would match"),
    (["zzzzz"], "no result for 'zzzzz'; `shardwright models --check NAME`"),
    (["llama", "--check", "opt"], "--check opt looks at one model, and llama filters the table"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[" ".join(options) for options, _ in WRONG])
def test_texts_that_no_model_has(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", *options]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.err.count("\n") == 1
    assert found.out == ""


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
