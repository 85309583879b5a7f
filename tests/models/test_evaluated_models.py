"""Evaluation under pipelines: all that a model returns is right, whatever it was cut from, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, keep_float64, run_ranks
from shardwright.utils.objects import tensors_within
from tests.models.beside_one_process import train_beside
from tests.models.evaluated_nets import REFUSED, RIGHT, Counts
from tests.models.side_doors import WORDS, batch

INTERLEAVED = {"pp_style": "interleaved", "num_model_chunks": 2}


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def boosted(build: Callable[[], Any], example: dict[str, Any], **layout: Any) -> tuple[Any, Any, Booster]:
    """The model in one process, the same over two stages."""
    plugin = HybridParallelPlugin(
        pp_size=2,
        precision="fp32",
        example_inputs=example,
        custom_policy="auto",
        num_microbatches=1 if build is Counts else 2,  # each counts as one
        **layout,
    )
    torch.manual_seed(0)
    plain = build().double()
    booster = Booster(plugin=plugin)
    model = copy.deepcopy(plain)
    return plain, booster.boost(model, adamw(model.parameters()))[0], booster


def evaluated(plain: Any, model: Any, booster: Booster, inputs: dict[str, Any]) -> None:
    """Compares all tensors that the model returns."""
    plain.eval()
    model.eval()
    with keep_float64(), torch.no_grad():
        want = plain(**inputs)
        found = booster.execute_pipeline(iter([inputs]), model, None, return_outputs=True)["outputs"]
    if found is not None:
        expected, given = list(tensors_within(want)), list(tensors_within(found))
        assert len(expected) == len(given)
        for one, two in zip(expected, given, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def right(rank: int, world: int) -> None:
    for net in RIGHT:
        for layout in ({}, INTERLEAVED):
            if net is Counts and layout:
                continue
            plain, model, booster = boosted(net, batch(5), **layout)
            evaluated(plain, model, booster, batch(1))
            evaluated(plain, model, booster, batch(2))
    inputs: dict[str, Any] = batch(5) | {"output_hidden_states": True, "use_cache": False}
    for layout in ({}, INTERLEAVED):
        evaluated(*boosted(llama, inputs, **layout), inputs)


def test_what_evaluation_alone_returns_is_right() -> None:
    run_ranks(right, 2)


def refused(rank: int, world: int) -> None:
    for net, words in REFUSED.items():
        plain, model, booster = boosted(net, batch(5), num_layers_per_stage=[2, 2])
        model.eval()
        with pytest.raises(ValueError, match=words):
            booster.execute_pipeline(iter([batch(1)]), model, None)
    _, counting, booster = boosted(Counts, batch(5), **INTERLEAVED)
    counting.eval()
    with pytest.raises(ValueError, match="makes a new evaluations of the old one, in each of the stages"):
        booster.execute_pipeline(iter([batch(1)]), counting, None)
    plain, model, booster = boosted(llama, batch(5))
    for entry, words in (
        ("output_hidden_states", r"stage 1 \(the last one\) reads what model\.layers\.0 returned, which is not sent"),
        ("use_cache", "each rank has the keys and values of its own layers alone"),
    ):
        with pytest.raises(ValueError, match=words):
            booster.execute_pipeline(iter([batch(1) | {entry: True}]), model, None, return_outputs=True)
    evaluated(plain, model, booster, batch(2) | {"use_cache": False})  # nothing was sent before the refusals


def test_what_stages_have_not_got_is_refused_by_name() -> None:
    run_ranks(refused, 2)


def trained(rank: int, world: int) -> None:
    """What evaluation alone reads has no gradient in training, on whichever rank it lies."""
    for net in RIGHT:
        for layout in ({}, {"zero_stage": 1}):
            plugin = HybridParallelPlugin(
                pp_size=world,
                precision="fp32",
                example_inputs=batch(5),
                custom_policy="auto",
                num_microbatches=2,
                **layout,
            )
            torch.manual_seed(0)
            plain = net().double()
            model = copy.deepcopy(plain)
            plain.register_forward_hook(lambda module, args, found: found if isinstance(found, dict) else vars(found))
            train_beside(Booster(plugin=plugin), plain, model, batch, (1, 2))


def test_training_is_not_touched_by_what_evaluation_reads() -> None:
    run_ranks(trained, 2)
