"""Experiment trackers by name; one that is not installed says how to install it before anything is trained."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..utils.errors import nearest
from ..utils.versions import is_installed
from .errors import RecipeError

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}


def wanted(report_to: str | Sequence[str]) -> list[str]:
    """The names of a recipe; RecipeError for one that nothing stands for, or whose package is missing."""
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    names = [name for name in names if name != "none"]
    for name in names:
        if name not in _PACKAGES:
            known = ["none", *_PACKAGES]
            raise RecipeError(f"report_to={name!r} is not one of {', '.join(known)}{nearest(name, known)}")
        if not is_installed(_PACKAGES[name]):
            raise RecipeError(f"report_to: {name} is not installed; pip install {_PACKAGES[name]}, or report_to: none")
    return names


class Tracker:
    """One of them, fed with every step and evaluation."""

    def __init__(self, name: str, run: str, directory: Path, config: Mapping[str, Any]) -> None:
        self.name, self.run, self.directory, self.config = name, run, directory, config
        self._writer: Any = None

    def started(self, facts: Mapping[str, Any]) -> None:
        if self.name == "tensorboard":
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(str(self.directory / "tensorboard"))
            return
        self._writer = importlib.import_module(self.name)
        if self.name == "mlflow":
            self._writer.start_run(run_name=self.run)
        else:
            # A project that is named by argument wins over the tracker's own variable in the environment.
            project = os.environ.get(f"{self.name.upper()}_PROJECT") or "shardwright"
            self._writer.init(project=project, name=self.run, config=dict(self.config))

    def step(self, metrics: Mapping[str, Any]) -> None:
        numbers = {key: value for key, value in metrics.items() if key != "step" and value is not None}
        if self.name == "tensorboard":
            for key, value in numbers.items():
                self._writer.add_scalar(key, value, metrics["step"])
        elif self.name == "mlflow":
            self._writer.log_metrics(numbers, step=metrics["step"])
        else:
            self._writer.log(numbers, step=metrics["step"])

    evaluated = step

    def finished(self, facts: Mapping[str, Any]) -> None:
        if self.name == "tensorboard":
            self._writer.close()
        elif self.name == "mlflow":
            self._writer.end_run()
        else:
            self._writer.finish()
