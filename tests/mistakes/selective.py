"""Mistakes in what layers recompute."""

from __future__ import annotations

import torch
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import adamw, zoo

from .table import mistake, refused


def tiny() -> nn.Module:
    return zoo.build("llama-causal-lm", dtype=torch.float32)


@mistake(
    symptom="`gradient_checkpointing_ratio` and `selective_ratio` that sum to more than 1",
    gets="refused: they are shares of the same layers; the `selective_ratio` that is left is named",
    fix="`selective_ratio=0.25` beside `gradient_checkpointing_ratio=0.75`",
)
def shares_of_the_same_layers(rank: int, world: int) -> None:
    with refused("sum to 1.75", "selective_ratio=0.25 would work"):
        PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.75, selective_ratio=1.0)
    PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.75, selective_ratio=0.25)


@mistake(
    symptom="`selective_ratio=0.1` on stages of few layers: the share rounds down to none",
    gets="a warning when the model is boosted and in the layout report, with the least ratio that has an effect",
    fix="a larger ratio, or `num_selective_layers_per_stage`",
)
def selective_ratio_that_rounds_down(rank: int, world: int) -> None:
    model = tiny()
    layers = len(model.model.layers)
    config = PipelineGradientCheckpointConfig(selective_ratio=0.1)
    [warning] = HybridParallelPlugin(gradient_checkpoint_config=config).preflight(model, adamw(model)).warnings
    assert f"selective_ratio=0.1 of at most {layers} layers per stage rounds down to none" in warning
    assert f"{1 / layers:g} is the least" in warning
    least = PipelineGradientCheckpointConfig(selective_ratio=1 / layers)
    assert (
        HybridParallelPlugin(gradient_checkpoint_config=least).preflight(model, adamw(model)).stages[0].selective == 1
    )


@mistake(
    symptom="`num_selective_layers_per_stage` that counts layers which are recomputed as a whole once more",
    gets="refused with the number of layers that are left",
    fix="as many as there are besides `num_ckpt_layers_per_stage`",
)
def more_layers_than_are_left(rank: int, world: int) -> None:
    model = tiny()
    layers = len(model.model.layers)
    config = PipelineGradientCheckpointConfig(
        num_ckpt_layers_per_stage=[layers - 1], num_selective_layers_per_stage=[2]
    )
    with refused("num_selective_layers_per_stage=", "has 1 layer besides", "at most 1 works"):
        HybridParallelPlugin(gradient_checkpoint_config=config).preflight(model, adamw(model))
    config = PipelineGradientCheckpointConfig(
        num_ckpt_layers_per_stage=[layers - 1], num_selective_layers_per_stage=[1]
    )
    HybridParallelPlugin(gradient_checkpoint_config=config).preflight(model, adamw(model))


@mistake(
    symptom="`selective_keep='aten.mm'`, one string for a list, or names without their namespace",
    gets="refused with an example",
    fix="`selective_keep=['aten.mm', 'aten.addmm']`",
)
def names_of_operators(rank: int, world: int) -> None:
    for wrong in ("aten.mm", ["mm"], []):
        with refused("selective_keep=", "'aten.mm', 'aten.addmm'"):
            PipelineGradientCheckpointConfig(selective_ratio=1.0, selective_keep=wrong)
    PipelineGradientCheckpointConfig(selective_ratio=1.0, selective_keep=["aten.mm", "aten.addmm"])


@mistake(
    symptom="a value from inside of a selectively recomputed layer is edited in place after the layer has returned",
    gets="refused in the backward pass: the layer keeps that very value, and would compute gradients from what it was "
    "made into",
    fix="edit a copy (`value.clone()`), or recompute the whole layer",
)
def edits_of_kept_values(rank: int, world: int) -> None:
    config = PipelineGradientCheckpointConfig(selective_ratio=1.0)
    for edited in (True, False):
        seen: list[torch.Tensor] = []
        model = tiny()
        model.model.layers[1].self_attn.q_proj.register_forward_hook(
            lambda module, args, output, seen=seen: seen.append(output)
        )
        model, optimizer, *_ = Booster(
            plugin=HybridParallelPlugin(precision="fp32", gradient_checkpoint_config=config)
        ).boost(model, adamw(model))
        loss = model(**zoo.inputs("llama-causal-lm", batch_size=2, seq_len=8)).loss
        with torch.no_grad():
            (seen[0] if edited else seen[0].clone()).mul_(2.0)
        if edited:
            with refused("edited in place after the layer had returned", "edit a copy"):
                optimizer.backward(loss)
        else:
            optimizer.backward(loss)
