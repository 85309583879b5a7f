"""What experiment trackers are told when a run begins."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from shardwright.trainer import RecipeError
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
