"""Mistakes in how a model is cut and a batch is run through its stages."""

from __future__ import annotations

import torch
from torch import nn

from shardwright import Booster
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, zoo

from .table import mistake, refused


def tiny() -> nn.Module:
    return zoo.build("llama-causal-lm", dtype=torch.float32)


@mistake(
    symptom="`pp_style='auto'` with `microbatch_size`",
    gets="refused: how good a schedule is depends on the number of microbatches; a number to begin with is named",
    fix="`num_microbatches=8`",
    worlds=(2, 4),
)
def search_without_microbatches(rank: int, world: int) -> None:
    with refused("pp_style='auto'", "needs num_microbatches", "num_microbatches=8 is a good start"):
        HybridParallelPlugin(pp_size=2, pp_style="auto", microbatch_size=1)
    HybridParallelPlugin(pp_size=2, pp_style="auto", num_microbatches=8)


@mistake(
    symptom="`pp_style='auto'` with `num_model_chunks` or `num_layers_per_stage`",
    gets="refused: the search chooses both, and would have to ignore what was given",
    fix="leave them out, or name the schedule they belong to",
    worlds=(2, 4),
)
def search_for_what_is_given(rank: int, world: int) -> None:
    with refused("num_model_chunks=2 with pp_style='auto'", "leave num_model_chunks out"):
        HybridParallelPlugin(pp_size=2, num_microbatches=4, pp_style="auto", num_model_chunks=2)
    with refused(r"num_layers_per_stage=\[3, 1\] with pp_style='auto'", "name a schedule"):
        HybridParallelPlugin(pp_size=2, num_microbatches=4, pp_style="auto", num_layers_per_stage=[3, 1])
    HybridParallelPlugin(pp_size=2, num_microbatches=4, num_layers_per_stage=[3, 1])


@mistake(
    symptom="`layer_costs` that were measured with another number of layers",
    gets="refused when the model is boosted, with the layers that it has; nothing was changed",
    fix="measure them again, or leave `layer_costs` out: costs are then estimated from the sizes of layers",
    worlds=(2, 4),
)
def costs_of_another_model(rank: int, world: int) -> None:
    model = tiny()
    with refused(r"layer_costs=\[1.0, 2.0, 1.0\]", "4 layers", "model.layers.0 to model.layers.3"):
        Booster(
            plugin=HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32", layer_costs=[1.0, 2.0, 1.0])
        ).boost(model, adamw(model))
    booster = Booster(
        plugin=HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32", layer_costs=[1.0, 1.0, 1.0, 3.0])
    )
    booster.boost(model, adamw(model))
    assert [len(stage.layers) for stage in booster.plugin.layout.stages] == [3, 1]  # type: ignore[union-attr]


@mistake(
    symptom="`offload_activations` without a pipeline",
    gets="refused: every backward follows its forward at once, so there is no time in which activations could be away",
    fix="let layers be recomputed: "
    "`gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)`",
)
def offload_without_a_pipeline(rank: int, world: int) -> None:
    with refused("offload_activations=0.5 with pp_size=1", "gradient_checkpoint_config"):
        HybridParallelPlugin(offload_activations=0.5)
    HybridParallelPlugin(gradient_checkpoint_config=PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0))


@mistake(
    symptom="`offload_activations` as a list with an entry per pipeline rank, where ranks have several stages",
    gets="refused, with the number of stages; nothing was changed",
    fix="one entry per stage, `pp_size` x `num_model_chunks` of them, or one number for all",
    worlds=(2, 4),
)
def offload_by_rank(rank: int, world: int) -> None:
    settings = {"pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2}
    with refused(r"offload_activations=\[1.0, 0.0\] has 2 entries for 4 stages", "one number for all"):
        HybridParallelPlugin(**settings, offload_activations=[1.0, 0.0])  # type: ignore[arg-type]
    HybridParallelPlugin(**settings, offload_activations=[1.0, 0.0, 1.0, 0.0])  # type: ignore[arg-type]


@mistake(
    symptom="`offload_activations` with two pipeline ranks and `1f1b`",
    gets="accepted, and nothing leaves: the report says that no microbatch waits long enough to be away",
    fix="more pipeline ranks, or `pp_style='interleaved'` with more chunks; for two ranks recompute layers",
    worlds=(2, 4),
)
def offload_what_is_needed_at_once(rank: int, world: int) -> None:
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32", offload_activations=1.0)
    assert any("nothing leaves" in note for note in plugin.preflight(tiny()).notes)
    chunks = {"pp_style": "interleaved", "num_model_chunks": 2}
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=4, precision="fp32", offload_activations=1.0, **chunks)  # type: ignore[arg-type]
    assert any("whose activations wait in host memory, by stage: 4" in note for note in plugin.preflight(tiny()).notes)
