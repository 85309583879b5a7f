"""What users need to test their own policies: rank processes, comparison, tiny models."""

from __future__ import annotations

from typing import Any

from .._moved import missing_name
from ..models.example_inputs import loss_of
from .compare import check_complete, compare_models
from .compare_report import Difference, MismatchError, Report
from .exact import keep_float64
from .rank_report import RankError
from .ranks import run_ranks
from .train import adamw, train_steps

__all__ = [
    "Difference",
    "MismatchError",
    "RankError",
    "Report",
    "adamw",
    "check_complete",
    "compare_models",
    "keep_float64",
    "loss_of",
    "run_ranks",
    "train_steps",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
