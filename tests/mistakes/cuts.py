"""Mistakes in where a model is cut."""

from __future__ import annotations

import torch
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, zoo

from .table import mistake, refused


def tiny() -> nn.Module:
    return zoo.build("llama-causal-lm", dtype=torch.float32)


@mistake(
    symptom="`cut_memory` below what any cut needs",
    gets="refused when the model is boosted, with the least that works; nothing was changed",
    fix="that number, fewer microbatches under `gpipe`, or recomputation: the bound is relative to `1f1b` with the "
    "same recomputation",
    worlds=(2, 4),
)
def bound_below_every_cut(rank: int, world: int) -> None:
    model = tiny()
    settings = {"pp_size": 2, "num_microbatches": 4, "pp_style": "gpipe", "precision": "fp32"}
    with refused(
        "cut_memory=1 is less than any cut of 4 layers takes",
        "pp_style='gpipe'",
        "the least that works is cut_memory=2",
    ):
        Booster(plugin=HybridParallelPlugin(**settings, cut_memory=1.0)).boost(model, adamw(model))  # type: ignore[arg-type]
    booster = Booster(plugin=HybridParallelPlugin(**settings, cut_memory=2.0))  # type: ignore[arg-type]
    booster.boost(model, adamw(model))


@mistake(
    symptom="`cut_memory` with `pp_style='auto'`",
    gets="refused: the search has a bound of its own",
    fix="`auto_memory`",
    worlds=(2, 4),
)
def bound_beside_the_searchs_own(rank: int, world: int) -> None:
    with refused("cut_memory=1.2 with pp_style='auto'", "auto_memory=1.2 works"):
        HybridParallelPlugin(pp_size=2, num_microbatches=4, pp_style="auto", cut_memory=1.2)
    HybridParallelPlugin(pp_size=2, num_microbatches=4, pp_style="auto", auto_memory=1.2)


@mistake(
    symptom="`num_layers_per_stage` with a 0 between other stages",
    gets="refused when the model is boosted: a stage between others would have nothing to do; nothing was changed",
    fix="0 only as the first entry, for embeddings alone, and as the last one, for norm, head and loss alone",
    worlds=(2, 4),
)
def stage_of_nothing(rank: int, world: int) -> None:
    model = tiny()
    settings = {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv", "num_model_chunks": 2, "precision": "fp32"}
    with refused(r"num_layers_per_stage=\[2, 0, 1, 1\] must hold", "the first may be 0", r"\[1, 1, 1, 1\] would work"):
        plugin = HybridParallelPlugin(**settings, num_layers_per_stage=[2, 0, 1, 1])  # type: ignore[arg-type]
        Booster(plugin=plugin).boost(model, adamw(model))
    plugin = HybridParallelPlugin(**settings, num_layers_per_stage=[0, 2, 2, 0])  # type: ignore[arg-type]
    Booster(plugin=plugin).boost(model, adamw(model))
    assert [stage.span for stage in plugin.layout.stages][::3] == [
        "what is before the layers",
        "what is behind the layers",
    ]  # type: ignore[union-attr]
