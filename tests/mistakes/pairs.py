"""Mistakes around forwards and backwards at the same time."""

from __future__ import annotations

from shardwright.plugins import HybridParallelPlugin

from .table import mistake, refused


@mistake(
    symptom="`pp_style='dualpipev'` with the default `num_model_chunks=1`, or spelt `DualPipeV`",
    gets="refused with the number of chunks that the schedule needs, or with the name that is meant",
    fix="`pp_style='dualpipev', num_model_chunks=2`",
)
def pairs_without_chunks(rank: int, world: int) -> None:
    with refused("num_model_chunks=1", "'dualpipev' needs exactly 2"):
        HybridParallelPlugin(pp_style="dualpipev")
    with refused("pp_style='DualPipeV'", "did you mean 'dualpipev'"):
        HybridParallelPlugin(pp_style="DualPipeV", num_model_chunks=2)
    HybridParallelPlugin(pp_style="dualpipev", num_model_chunks=2)
