"""Layouts of HybridParallelPlugin against one process: loss, every gradient, every updated weight."""

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
from shardwright.testing import adamw, compare_models, keep_float64, run_ranks, zoo

CLIPPED = Habits(clip="plugin", clip_at=0.05)
LAYOUTS = [
    Layout("llama-causal-lm", 1),
    Layout("llama-causal-lm", 2, {"tp_size": 2}),
    # whose constructor makes its state
    Layout("llama-causal-lm", 2, {"zero_stage": 1}, habits=Habits(optimizer="adagrad")),
    Layout("llama-causal-lm", 2, {"zero_stage": 3}, habits=Habits(optimizer="adagrad")),
    Layout("llama-causal-lm", 2, {"pp_size": 2, "num_microbatches": 3}),
    Layout("llama-tied-causal-lm", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 4}, habits=CLIPPED),
    Layout(
        "llama-tied-causal-lm",
        4,
        {"pp_size": 2, "num_microbatches": 3, "zero_stage": 1},
        habits=CLIPPED,
        accumulate=2,
    ),
    Layout(
        "llama-tied-causal-lm",
        4,
        {"pp_size": 2, "num_microbatches": 3, "zero_stage": 2},
        habits=Habits(clip="plugin", clip_at=0.05, embeds=True),  # one of the tied copies gets no gradient
        accumulate=2,
    ),
    Layout(
        "llama-tied-causal-lm",
        4,
        {"pp_size": 2, "num_microbatches": 3, "zero_stage": 3},
        habits=Habits(clip="plugin", clip_at=0.05, embeds=True),  # one of the tied copies gets no gradient
        accumulate=2,
    ),
    Layout("llama-causal-lm", 4, {"tp_size": 2, "zero_stage": 3}, habits=CLIPPED),
    Layout(
        "gpt2-causal-lm",
        4,
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb"},
        habits=CLIPPED,
    ),
    Layout(
        "bert-masked-lm",
        4,
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2},
    ),
    Layout("t5-conditional-generation", 4, {"tp_size": 2, "pp_size": 2, "num_microbatches": 3}, checkpointing=True),
    Layout(
        "qwen3-moe-causal-lm",
        2,
        {"pp_size": 2, "num_microbatches": 2, "pp_style": "zb", "zero_stage": 2},
        habits=CLIPPED,
    ),
    Layout(
        "qwen3-moe-causal-lm",
        4,
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 3, "pp_style": "zbv", "num_model_chunks": 2},
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout)


@keep_float64()
def train_lazily(rank: int, world: int, plugin_settings: dict) -> dict:
    """Build without weights, boost, train a step; the weights must not depend on the layout."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **plugin_settings))
    config = zoo.config("llama-tied-causal-lm", num_hidden_layers=4, dtype="float64")
    with LazyInitContext(seed=11):
        model = transformers.LlamaForCausalLM(config).double()
    assert all(param.is_meta for param in model.parameters())
    optimizer = adamw(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = zoo.inputs("llama-tied-causal-lm", batch_size=4, seed=3)
    result = booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer)
    optimizer.step()
    with LazyInitContext(seed=11):
        reference = transformers.LlamaForCausalLM(config).double()
    LazyInitContext.materialize(reference)
    reference_optimizer = adamw(reference)
    loss = reference(**batch).loss
    loss.backward()
    reference_optimizer.step()
    held = compare_models(reference, model, coordinate=booster.plugin.mesh.coordinate, gradients=False).held
    if result["loss"] is not None:
        torch.testing.assert_close(result["loss"], loss.detach(), rtol=1e-10, atol=1e-10)
    return {"held": len(held)}


@pytest.mark.parametrize(
    "settings", [{}, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2, "zero_stage": 1}], ids=["alone", "tp2-pp2"]
)
def test_lazily_built_models_have_the_same_weights_in_every_layout(settings: dict) -> None:
    run_ranks(train_lazily, settings.get("tp_size", 1) * settings.get("pp_size", 1), settings)


@keep_float64()
def train_by_calls(rank: int, world: int, settings: dict) -> None:
    """The plain loop: call the model, booster.backward, step. Data parallelism averages the ranks' losses, as DDP
    does.
    """
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", max_norm=0.05, **settings))
    mesh = booster.plugin.mesh
    reference, model = zoo.build("llama-tied-causal-lm"), zoo.build("llama-tied-causal-lm")
    reference_optimizer, optimizer = adamw(reference), adamw(model)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(2):
        batch = zoo.inputs("llama-tied-causal-lm", batch_size=2 * mesh.size("dp"), seed=step)
        parts = [
            {name: value[2 * part : 2 * part + 2] for name, value in batch.items()} for part in range(mesh.size("dp"))
        ]
        losses = [reference(**part).loss for part in parts]
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        reference_optimizer.step()
        reference_optimizer.zero_grad()
        loss = model(**parts[mesh.coordinate("dp")]).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        mine = losses[mesh.coordinate("dp")]
        torch.testing.assert_close(loss.detach(), mine.detach(), rtol=1e-10, atol=1e-10)
        compare_models(reference, model, coordinate=mesh.coordinate, gradients=False)


@pytest.mark.parametrize(
    "settings",
    [{"tp_size": 2}, {"tp_size": 2, "zero_stage": 1}, {"tp_size": 2, "zero_stage": 3}, {"zero_stage": 2}],
    ids=str,
)
def test_the_plain_loop(settings: dict) -> None:
    run_ranks(train_by_calls, 4, settings)


def token_loss(outputs: Any, inputs: Any) -> torch.Tensor:
    """A criterion of one's own on logits, of which a rank may hold only some columns."""
    logits, labels = outputs.logits[:, :-1], inputs["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 101), labels.reshape(-1), label_smoothing=0.1)


@keep_float64()
def train_with_criterion(rank: int, world: int, settings: dict) -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **settings))
    mesh = booster.plugin.mesh
    reference, model = zoo.build("llama-causal-lm"), zoo.build("llama-causal-lm")
    reference_optimizer, optimizer = adamw(reference), adamw(model)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, token_loss)
    batch = zoo.inputs("llama-causal-lm", batch_size=5, seed=1)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    loss = token_loss(reference(**inputs), batch)
    loss.backward()
    result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_outputs=True)
    if result["loss"] is not None:
        torch.testing.assert_close(result["loss"], loss.detach(), rtol=1e-10, atol=1e-10)
        assert result["outputs"]["logits"].shape[:2] == batch["labels"].shape
    compare_models(reference, model, coordinate=mesh.coordinate, gradients=optimizer.gradients(), weights=False)
    reference_optimizer.step()
    optimizer.step()
    compare_models(reference, model, coordinate=mesh.coordinate, gradients=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"tp_size": 2, "num_microbatches": 3},
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 3},
        {"pp_size": 2, "num_microbatches": 2},
    ],
    ids=str,
)
def test_a_criterion_of_ones_own(settings: dict) -> None:
    run_ranks(train_with_criterion, settings.get("tp_size", 1) * settings.get("pp_size", 1), settings)


@keep_float64()
def train_with_a_choice(rank: int, world: int, changing: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", num_microbatches=2))
    reference, model = zoo.build("llama-causal-lm"), zoo.build("llama-causal-lm")
    model, optimizer, *_ = booster.boost(model, adamw(model))
    batch = zoo.inputs("llama-causal-lm", batch_size=4, seed=1)
    loss = reference(**batch).loss
    loss.backward()

    def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
        own: torch.Tensor = outputs.loss
        return own * 1.0 if rank == changing else own

    mine = {name: value.chunk(2)[rank] for name, value in batch.items()}
    result = booster.execute_pipeline(iter([mine]), model, criterion, optimizer, return_outputs=True)
    for found in (result["loss"], result["outputs"]["loss"]):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-10, atol=1e-10)
    compare_models(reference, model, gradients=optimizer.gradients(), weights=False)


def test_a_criterion_that_hands_back_the_model_s_loss_on_one_rank() -> None:
    """As one does that looks at the batch; what ranks exchange of the loss is equally much all the same."""
    for changing in (0, 1):
        run_ranks(train_with_a_choice, 2, changing)
