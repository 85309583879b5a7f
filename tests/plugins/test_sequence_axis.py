"""Sequences split over ranks of their own: layouts against one process, and what cannot be split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from habits import Habits
from hybrid_ranks import Layout, run_layout

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.plugins.hybrid.sequence_probe import probe_ulysses
from shardwright.testing import run_ranks, zoo

ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
LAYOUTS = [
    Layout("llama-causal-lm", 2, ULYSSES, calls=True, habits=Habits(lora=True), checkpointing=True),
    Layout("bert-masked-lm", 2, ULYSSES, calls=True, steps=2),
    # windows; heads that do not divide
    Layout("mistral-causal-lm", 3, {**ULYSSES, "sp_size": 3, "zero_stage": 3}, steps=2),
    Layout(
        "gpt2-causal-lm",
        4,
        {**ULYSSES, "pp_size": 2, "num_microbatches": 2, "pp_style": "zb", "zero_stage": 1},
        habits=Habits(clip="plugin", clip_at=0.05),
        accumulate=2,
        steps=2,
    ),
]
SWEEP = [
    Layout(model, world, {**ULYSSES, **plugin}, calls=calls)
    for model in (
        "llama-causal-lm",
        "qwen3-causal-lm",
        "gpt2-causal-lm",
        "mistral-causal-lm",
        "mixtral-causal-lm",
        "bert-masked-lm",
        "llama-token-classification",
    )
    for world, plugin, calls in [
        (2, {}, False),
        (2, {"zero_stage": 2}, True),
        (4, {"sp_size": 4}, True),
        (4, {"tp_size": 2, "zero_stage": 3}, False),
        (4, {"pp_size": 2, "num_microbatches": 3}, False),
        (4, {"pp_size": 2, "num_microbatches": 2, "pp_style": "zbv", "num_model_chunks": 2}, False),
    ]
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", SWEEP, ids=str)
def test_every_layout(layout: Layout) -> None:
    run_ranks(run_layout, layout.world, layout)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bloom-causal-lm", "does not go through transformers' AttentionInterface"),
        ("llama-sequence-classification", "no logits for every token"),
        ("t5-conditional-generation", "T5ForConditionalGeneration cannot have its sequences split"),
    ],
)
def test_models_that_cannot_be_split_are_named(name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        probe_ulysses(zoo.build(name))


def test_what_is_found_out_of_models() -> None:
    decoder, encoder, by_mask = map(
        probe_ulysses, map(zoo.build, ("mistral-causal-lm", "bert-masked-lm", "opt-causal-lm"))
    )
    assert decoder == (True, True, True, True)
    assert encoder == (False, False, True, False)
    assert not by_mask.own_positions


def mistakes(rank: int, world: int) -> None:
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **ULYSSES))
    model = zoo.build("llama-causal-lm", dtype=torch.float32)
    batch = zoo.inputs(model)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def refused(words: str, call: Any) -> None:
        with pytest.raises(ValueError, match=words):
            call()

    ids = batch["input_ids"]
    refused("without labels", lambda: model(input_ids=ids))
    refused("cannot be cut along", lambda: model(**batch, extra=torch.ones(len(ids), 3)))
    refused("attention_mask of 4 dims", lambda: model(input_ids=ids, attention_mask=ids[:, None, None]))
    refused("call the model that boost returned", lambda: model.unwrap()(**batch))
    refused("generate with sequence_parallelism_mode", lambda: model.generate(ids))
    refused(
        "criterion='looks'.*outputs.loss alone",
        lambda: booster.execute_pipeline(iter([batch]), model, looks, optimizer),
    )
    with torch.no_grad():
        assert model(input_ids=ids).logits.shape[1] == -(-ids.shape[1] // world)


def looks(outputs: Any, inputs: Any) -> torch.Tensor:
    loss: torch.Tensor = torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), inputs["labels"].flatten())
    return loss


def test_mistakes() -> None:
    run_ranks(mistakes, 2)
