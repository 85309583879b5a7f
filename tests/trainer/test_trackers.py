"""What experiment trackers are told when a run begins."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from shardwright.trainer import RecipeError, trackers
from shardwright.trainer.trackers import Tracker, wanted
from shardwright.utils.versions import is_installed


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.parametrize("project", [None, "foxes"])
def test_the_project_of_the_environment_is_taken(
    name: str, project: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A project that is given by argument would hide the tracker's own variable."""
    told: dict[str, Any] = {}
    module = types.ModuleType(name)
    module.init = told.update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(f"{name.upper()}_PROJECT", raising=False)
    if project is not None:
        monkeypatch.setenv(f"{name.upper()}_PROJECT", project)
    Tracker(name, "first", tmp_path, {"seed": 1}).started({})
    assert told == {"project": project or "shardwright", "name": "first", "config": {"seed": 1}}


def test_a_directory_with_the_name_of_a_tracker_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun starts ranks with the directory of the job on their path, where wandb leaves its files in `wandb`."""
    (tmp_path / "trackio").mkdir()
    paths = [path for path in sys.path if not (Path(path) / "trackio").exists()]  # one that is installed comes first
    monkeypatch.setattr(sys, "path", [str(tmp_path), *paths])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(RecipeError, match="trackio is not installed; pip install trackio"):
        wanted("trackio")
    assert is_installed("json")


class _Written:
    """What stands in a directory of tensorboard's, of which a reader is shown what no later file has taken back."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, str], dict[int, float]] = {}

    def writer(self, place: str, purge_step: int) -> Any:
        for (where, _), values in self.scalars.items():
            for step in [step for step in values if where == place and step >= purge_step]:
                del values[step]

        def add(key: str, value: float, step: int) -> None:
            values = self.scalars.setdefault((place, key), {})
            assert step not in values, "told twice"
            values[step] = value

        return types.SimpleNamespace(add_scalar=add, close=lambda: None)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> _Written:
    found = _Written()
    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = found.writer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def test_tensorboard_shows_a_run_by_its_name(tmp_path: Path, written: _Written) -> None:
    for name in (None, "first try", "team/second"):
        tracker = Tracker("tensorboard", name, tmp_path, {})
        tracker.started({"step": 0})
        tracker.step({"step": 1, "loss": 2.0, "grad_norm": None})
        tracker.finished({})
    places = [tmp_path / "tensorboard" / name for name in ("", "first try", "team/second")]
    assert written.scalars == {(str(place), "loss"): {1: 2.0} for place in places}


def test_tensorboard_shows_a_step_once(tmp_path: Path, written: _Written) -> None:
    """Of a run in the directory of another, of one that goes on from a checkpoint, and of one that goes back to it."""

    def told(begun: int, *steps: int) -> list[int]:
        tracker = Tracker("tensorboard", None, tmp_path, {})
        tracker.started({"step": begun})
        for step in steps:
            tracker.step({"step": step, "loss": 1.0})
            if step == begun + 2:
                tracker.evaluated({"step": step, "eval_loss": 1.0})
        tracker.finished({})
        return sorted(written.scalars[str(tmp_path / "tensorboard"), "loss"])

    assert told(0, 1, 2, 3, 4, 5) == [1, 2, 3, 4, 5]
    assert told(3, 4, 5, 6) == [1, 2, 3, 4, 5, 6]
    assert told(6, 7, 8, 9, 8, 9) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert told(0, 1, 2) == [1, 2]
    assert sorted(written.scalars[str(tmp_path / "tensorboard"), "eval_loss"]) == [2]


@pytest.mark.parametrize("name", ["/tmp/elsewhere", "../elsewhere", ".", ""])
def test_a_name_of_a_run_that_leaves_its_directory_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda package: True)
    with pytest.raises(RecipeError, match=r"run_name=.* tensorboard calls a run by its directory.* such as first-try"):
        wanted("tensorboard", name)
    assert wanted(["tensorboard"], "team/first try") == ["tensorboard"]
    assert wanted("wandb", name) == ["wandb"]
