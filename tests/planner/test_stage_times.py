"""Stages of a model whose vocabulary is large: the cut that nobody has asked for makes the slowest of them faster than
an even one, the search knows it, and the numbers are those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Gemma2Config, Gemma2ForCausalLM

from shardwright import Booster
from shardwright.cluster.launch import launch
from shardwright.lazy import LazyInitContext
from shardwright.models.layer_chain import find_units
from shardwright.pipeline.planning.placement import Placement
from shardwright.planner.machines import machine
from shardwright.planner.operators import Operator
from shardwright.planner.stages import Ends, dealt
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, run_ranks

HIDDEN, INNER, LAYERS, VOCABULARY, HEADS, KEYS, WIDTH = 2304, 9216, 26, 256000, 8, 4, 256
LENGTH = 4096


def config(**changes: Any) -> Gemma2Config:
    """Of 2.6 billion parameters, as published; more than a fifth of them are its table, which is the head, too."""
    return Gemma2Config(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEYS,
            "head_dim": WIDTH,
            **changes,
        }
    )


def seconds(layers: int, head: bool) -> float:
    """Of a stage's forward and backward on an H100, for one sample."""
    linear = HIDDEN * WIDTH * 2 * (HEADS + KEYS) + 3 * HIDDEN * INNER
    products = {Operator("product", 6 * LENGTH * linear, 0): float(layers)}
    products[Operator("attention", 3 * 2 * LENGTH * LENGTH * HEADS * WIDTH, 0)] = float(layers)
    products[Operator("product", 6 * LENGTH * HIDDEN * VOCABULARY, 0)] = float(head)
    return machine("h100").computing(products)


@pytest.mark.parametrize(("ranks", "faster"), [(2, 0.12), (4, 0.2)])
def test_the_slowest_stage_is_faster_than_that_of_an_even_cut(ranks: int, faster: float) -> None:
    launch(0, ranks, None, None, backend="fake")
    try:
        with LazyInitContext():
            model = Gemma2ForCausalLM(config())
        plugin = HybridParallelPlugin(pp_size=ranks, num_microbatches=2 * ranks, precision="bf16")
        layout = plugin.preflight(model, torch.optim.AdamW(model.parameters()))
    finally:
        dist.destroy_process_group()
    counts = [len(stage.layers) for stage in layout.stages]
    assert counts == list(dealt(LAYERS, Ends.of(model, find_units(model)), Placement(ranks), 0.0, 0.0))

    def slowest(cut: list[int]) -> float:
        return max(seconds(layers, stage == ranks - 1) for stage, layers in enumerate(cut))

    even = [LAYERS // ranks + (stage < LAYERS % ranks) for stage in range(ranks)]
    assert slowest(counts) < (1 - faster) * slowest(even)
    others = [[*counts[:-2], counts[-2] + moved, counts[-1] - moved] for moved in (-1, 1) if counts[-1] >= moved]
    assert slowest(counts) <= 1.06 * min(map(slowest, others))


def trained(rank: int, world: int) -> list[int]:
    small = config(
        vocab_size=601, hidden_size=32, intermediate_size=64, num_hidden_layers=6, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1,
    )  # fmt: skip

    def made() -> Gemma2ForCausalLM:
        torch.manual_seed(0)
        return Gemma2ForCausalLM(small)

    plugin = HybridParallelPlugin(pp_size=world, num_microbatches=2, precision="fp32")
    plain, model = made(), made()
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    step: Any = adamw(plain.parameters())
    for seed in (1, 2):
        ids = torch.randint(601, (4, 7), generator=torch.Generator().manual_seed(seed))
        batch = {"input_ids": ids, "labels": ids}
        want = plain(**batch).loss
        want.backward()
        given = booster.execute_pipeline(iter([batch]), boosted, None, optimizer, return_loss=True)
        if given["loss"] is not None:
            torch.testing.assert_close(given["loss"], want, rtol=1e-5, atol=1e-5)
        place = plugin.mesh.coordinate
        compare_models(plain, boosted, coordinate=place, gradients=optimizer.gradients(), weights=False)
        step.step()
        optimizer.step()
        step.zero_grad()
        optimizer.zero_grad()
    compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)
    assert plugin.layout is not None
    return [len(stage.layers) for stage in plugin.layout.stages]


def test_stages_of_different_sizes_train_as_one_process_does() -> None:
    for counts in run_ranks(trained, 2, timeout=120):
        assert sum(counts) == 6
        assert counts[0] > counts[1]
