"""What users need to test their own policies: rank processes, comparison, tiny models."""

from __future__ import annotations

from shardwright.testing.exact import keep_float64
from shardwright.testing.inputs import loss_of
from shardwright.testing.rank_report import RankError
from shardwright.testing.ranks import run_ranks

__all__ = ["RankError", "keep_float64", "loss_of", "run_ranks"]
