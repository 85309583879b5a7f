"""`shardwright train` as users start it: from a file, on ranks of its own, interrupted, resumed, and with mistakes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from recipe_files import recipe

from shardwright.cli.main import main
from shardwright.trainer import read_recipe, run
from shardwright.trainer.errors import RecipeError, RowError
from shardwright.trainer.reading import keys_of
from shardwright.trainer.recipe import Data, Lora, Recipe
from shardwright.trainer.spikes import LossSpike

ROOT = Path(__file__).parents[2]


def write(folder: Path, **changes: Any) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe(folder, **changes)))
    return file


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardwright.cli", "train", *arguments]


@pytest.mark.timeout(240)
def test_a_run_that_is_interrupted_goes_on(tmp_path: Path) -> None:
    """SIGTERM to the command: all ranks save at the end of their step, and the command with resume=true goes on."""
    file = write(tmp_path, layout={"pp_size": 2, "num_microbatches": 2}, save_strategy="steps")
    metrics = tmp_path / "out" / "metrics.jsonl"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command(str(file), "max_steps=100000"), env=environment, cwd=tmp_path) as running:
        until = time.monotonic() + 120
        while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1):
            assert running.poll() is None, "it has ended"
            assert time.monotonic() < until, "no step in two minutes"
            time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 143
    (saved,) = (tmp_path / "out" / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    arguments = (str(file), "resume=true", f"max_steps={step + 2}")
    subprocess.run(command(*arguments), env=environment, cwd=tmp_path, check=True, timeout=120)
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, step + 3))
    assert (tmp_path / "out" / "model" / "config.json").exists()
    assert yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())["resume"] is True


def test_mistakes_end_before_ranks_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence and status 2; the layout is looked at on the ranks that would be started."""
    file = write(tmp_path)
    assert main(["train", str(file), "learning_rat=1"]) == 2
    assert "did you mean 'learning_rate'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["train", f"data.path={file}"])
    assert "give a recipe, before keys" in capsys.readouterr().err
    ended = subprocess.run(
        command(str(file), "layout={tp_sise: 2}"),
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("shardwright train: ")
    assert "tp_size" in line
    assert "Starting" not in ended.stdout


def test_a_launcher_may_look_at_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """--check trains nothing on ranks that are there; keys may stand behind options; nproc is the launcher's."""
    file = str(write(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", file, "--check", "max_steps=3", "--seed=4"]) == 0
    assert capsys.readouterr().out == "This recipe works on 2 ranks.\n"
    assert main(["train", file, "--check", "nproc=4"]) == 2
    assert "leave nproc out" in capsys.readouterr().err
    assert main(["train", file, "--nproc", "0"]) == 2
    assert "--nproc=0 is too small" in capsys.readouterr().err
    assert main(["train", file, "--profile", "0"]) == 2
    assert "--profile=0 is too small" in capsys.readouterr().err


def test_a_row_that_one_rank_finds_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Other mistakes are told by the first rank alone, since all have them."""
    for error, said in (
        (RowError("a.jsonl, row 3: text is needed"), "shardwright train: a.jsonl, row 3: text is needed\n"),
        (
            RowError("Caught\n Traceback\nx.RowError: row 3: text is needed"),
            "shardwright train: row 3: text is needed\n",
        ),
        (RecipeError("no"), ""),
    ):

        def fail(recipe: Any, error: Exception = error) -> int:
            raise error

        monkeypatch.setattr(run, "train", fail)
        monkeypatch.setenv("SHARDWRIGHT_RECIPE_CHECKED", "1")
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert main(["train", str(write(tmp_path))]) == 2
        assert capsys.readouterr().err == said


@pytest.mark.parametrize("saved", [False, True])
def test_a_loss_that_ends_a_run_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, saved: bool
) -> None:
    def spike(recipe: Any) -> int:
        raise LossSpike("the loss of step 20 is 7")

    monkeypatch.setattr(run, "train_here", spike)
    monkeypatch.setattr(run, "candidates", lambda path: ([path], []) if saved else ([], []))
    monkeypatch.setattr(run, "launch_from_torch", lambda seed: None)
    monkeypatch.setattr(run.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(run.dist, "destroy_process_group", lambda: None)
    assert run.train(read_recipe(write(tmp_path)).recipe) == 1
    said = capsys.readouterr().err
    assert said.startswith("shardwright train: the loss of step 20 is 7; ")
    assert ("resume=true goes on" if saved else "there is no checkpoint") in said


def test_the_page_lists_every_key() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE))
    for kind, prefix in ((Recipe, ""), (Data, "data."), (Lora, "lora.")):
        for name, (_, key) in keys_of(kind).items():
            assert rows[f"{prefix}{name}"].startswith(key.doc), name
