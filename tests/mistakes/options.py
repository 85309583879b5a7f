"""Mistakes in the settings of plugins."""

from __future__ import annotations

from shardwright.plugins import HybridParallelPlugin

from .table import mistake, refused


@mistake(
    symptom="`HybridParallelPlugin(precision='half')`",
    gets="refused with the formats there are",
    fix="`precision='bf16'`",
)
def unknown_precision(rank: int, world: int) -> None:
    with refused("precision='half'", "'bf16'"):
        HybridParallelPlugin(precision="half")
