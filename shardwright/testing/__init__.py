"""What users need to test their own policies: rank processes, comparison, tiny models."""

from __future__ import annotations

from shardwright.testing.rank_report import RankError
from shardwright.testing.ranks import run_ranks

__all__ = ["RankError", "run_ranks"]
