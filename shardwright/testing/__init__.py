"""What users need to test their own policies: rank processes, comparison, tiny models."""

from __future__ import annotations

from typing import Any

from shardwright._moved import missing_name
from shardwright.models.example_inputs import loss_of
from shardwright.testing.compare import check_complete, compare_models
from shardwright.testing.compare_report import Difference, MismatchError, Report
from shardwright.testing.exact import keep_float64
from shardwright.testing.rank_report import RankError
from shardwright.testing.ranks import run_ranks
from shardwright.testing.train import adamw, train_steps

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
