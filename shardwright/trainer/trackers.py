"""Experiment trackers by name; one that is not installed says how to install it before anything is trained."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from ..utils.errors import nearest
from ..utils.versions import is_installed
from .errors import RecipeError

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


def wanted(report_to: str | Sequence[str], run_name: str | None = None) -> list[str]:
    """The names of a recipe; RecipeError for one that nothing stands for, or whose package is missing, and for a
    name of the run that it cannot be called by.
    """
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in _PACKAGES:
            known = ["none", *_PACKAGES]
            raise RecipeError(f"report_to={name!r} is not one of {', '.join(known)}{nearest(name, known)}")
        if not is_installed(_PACKAGES[name]):
            raise RecipeError(f"report_to: {name} is not installed; pip install {_PACKAGES[name]}, or report_to: none")
    if "tensorboard" in names and run_name is not None and not _is_below(run_name):
        raise RecipeError(
            f"run_name={run_name!r}: tensorboard calls a run by its directory, and this one would not be in the run's "
            "own; give a name such as first-try"
        )
    return names


def _is_below(name: str) -> bool:
    """Whether it is the path of a directory below the one that it is read from."""
    path = PurePath(name)
    return path.parts != () and not path.is_absolute() and ".." not in path.parts and "\0" not in name


class Tracker:
    """One of them, fed with every step and evaluation.

    run         what it calls the run; None: the run's directory
    directory   of the run
    """

    def __init__(self, name: str, run: str | None, directory: Path, config: Mapping[str, Any]) -> None:
        self.name, self.run, self.directory, self.config = name, run, directory, config
        self._writer: Any = None
        self._last = 0  # step that was told

    def started(self, facts: Mapping[str, Any]) -> None:
        if self.name == "tensorboard":
            step = facts["step"]
            self._write_from(step + 1 if step else 0)
            return
        self._writer = importlib.import_module(self.name)
        if self.name == "mlflow":
            self._writer.start_run(run_name=self._called)
        else:
            # A project that is named by argument wins over the tracker's own variable in the environment.
            project = os.environ.get(f"{self.name.upper()}_PROJECT") or "shardwright"
            self._writer.init(project=project, name=self._called, config=dict(self.config))

    @property
    def _called(self) -> str:
        return self.run or str(self.directory)

    def _write_from(self, step: int) -> None:
        """Files of tensorboard, which shows no more of older ones from this step on: those of a run that was here
        before, or steps that are trained again.
        """
        place = self.directory / "tensorboard" / (self.run or "")
        self._writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(place), purge_step=step)

    def step(self, metrics: Mapping[str, Any]) -> None:
        if self.name == "tensorboard" and metrics["step"] <= self._last:  # the run went back to a checkpoint
            self._writer.close()
            self._write_from(metrics["step"])
        self._last = metrics["step"]
        self._log(metrics)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        self._log(metrics)

    def _log(self, metrics: Mapping[str, Any]) -> None:
        numbers = {key: value for key, value in metrics.items() if key != "step" and value is not None}
        if self.name == "tensorboard":
            for key, value in numbers.items():
                self._writer.add_scalar(key, value, metrics["step"])
        elif self.name == "mlflow":
            self._writer.log_metrics(numbers, step=metrics["step"])
        else:
            self._writer.log(numbers, step=metrics["step"])

    def finished(self, facts: Mapping[str, Any]) -> None:
        if self.name == "tensorboard":
            self._writer.close()
        elif self.name == "mlflow":
            self._writer.end_run()
        else:
            self._writer.finish()
