"""Stages without layers: embeddings in front of the layers, norm and head behind them, in layouts of
HybridParallelPlugin.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from habits import Habits
from hybrid_ranks import Layout, run_layout

from shardwright import Booster
from shardwright.lazy import LazyInitContext
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import adamw, run_ranks, zoo

PIPE = {"pp_size": 2, "num_microbatches": 3}
V = {**PIPE, "num_model_chunks": 2, "num_layers_per_stage": [0, 2, 2, 0]}
FOUR = {"num_hidden_layers": 4}
CHECKPOINTED = {
    "gradient_checkpoint_config": PipelineGradientCheckpointConfig(
        num_ckpt_layers_per_stage=[0, 1, 1, 0], selective_ratio=0.5
    )
}
SIZES = {"num_layers": 2, "num_decoder_layers": 2}
LAYOUTS = [
    Layout(
        "llama-causal-lm",
        2,
        {**PIPE, "num_layers_per_stage": [0, 2], "zero_stage": 3},
        {"num_hidden_layers": 2},
        steps=2,
    ),
    Layout("llama-tied-causal-lm", 2, {**V, "pp_style": "zbv", "zero_stage": 2, **CHECKPOINTED}, FOUR, steps=2),
    Layout("llama-causal-lm", 2, {**V, "pp_style": "zbv", "zero_stage": 1}, FOUR, habits=Habits(lora=True), steps=2),
    Layout(
        "llama-causal-lm",
        2,
        {**PIPE, "num_layers_per_stage": [0, 2]},
        {"num_hidden_layers": 2},
        habits=Habits(embeds=True),
    ),
    Layout(
        "llama-causal-lm",
        2,
        {**PIPE, "num_layers_per_stage": [0, 2]},
        {"num_hidden_layers": 2},
        habits=Habits(lora=True),
        steps=2,
    ),
    Layout(
        "t5-conditional-generation", 2, {**V, "pp_style": "interleaved", "offload_activations": 1.0}, SIZES, steps=2
    ),
    Layout("gpt2-causal-lm", 4, {**V, "pp_style": "dualpipev", "tp_size": 2}, {"n_layer": 4}, steps=2),
    Layout("qwen3-moe-causal-lm", 4, {**V, "pp_style": "zbv", "zero_stage": 3}, FOUR, steps=2),
    Layout(
        "llama-tied-causal-lm",
        4,
        {**PIPE, "pp_size": 4, "num_layers_per_stage": [0, 1, 1, 0]},
        {"num_hidden_layers": 2},
    ),
    Layout(
        "bert-masked-lm", 4, {**PIPE, "tp_size": 2, "num_layers_per_stage": [0, 2]}, {"num_hidden_layers": 2}, steps=2
    ),
]


def _run(rank: int, world: int, layouts: list[Layout]) -> None:
    for layout in layouts:
        run_layout(rank, world, layout)


@pytest.mark.parametrize("world", [2, 4])
def test_layouts(world: int) -> None:
    run_ranks(_run, world, [layout for layout in LAYOUTS if layout.world == world])


def _lazily(rank: int, world: int) -> tuple[list[str], list[str]]:
    config = zoo.config("llama-causal-lm", num_hidden_layers=2)
    built: list[Any] = []
    for _ in range(2):
        with LazyInitContext(seed=4):
            built.append(transformers.LlamaForCausalLM(config))
    model, reference = built
    LazyInitContext.materialize(reference)
    plugin = HybridParallelPlugin(
        pp_size=2, num_microbatches=2, precision="fp32", num_layers_per_stage=[0, 2], zero_stage=1
    )
    boosted, *_ = Booster(plugin=plugin).boost(model, adamw(model))
    whole = dict(reference.named_parameters())
    held = dict(boosted.unwrap().named_parameters())
    for name, parameter in held.items():
        assert torch.equal(parameter, whole[name]), name
    return list(held), [stage.span for stage in plugin.layout.stages]  # type: ignore[union-attr]


def test_a_rank_that_only_embeds_makes_nothing_else() -> None:
    (embeds, spans), (others, _) = run_ranks(_lazily, 2)
    assert embeds == ["model.embed_tokens.weight"]
    assert "model.embed_tokens.weight" not in others
    assert spans == ["what is before the layers", "model.layers.0 to model.layers.1"]
