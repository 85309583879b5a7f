"""Linears in 8 bits: every layout has the loss, gradients and weights of one process with the same linears by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import compare_models, keep_float64, run_ranks, zoo
from tests.fp8_by_hand import Recipe, compute_by_hand

MODEL = "llama-causal-lm"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
DELAYED = {"scaling": "delayed", "amax_history": 2}
ROWS = {"granularity": "rowwise"}
ALL = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
PIPE = {"pp_size": 2, "num_microbatches": 2}

# arguments of the plugin, options
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp, delayed, recomputed": ({"tp_size": 2, "gradient_checkpoint_config": ALL, "num_microbatches": 2}, DELAYED),
    "tp, rows, split sequences": ({"tp_size": 2, "enable_sequence_parallelism": True}, ROWS),
    "zb, delayed, recomputed": ({**PIPE, "pp_style": "zb", "gradient_checkpoint_config": ALL}, DELAYED),
    "zero 3": ({"zero_stage": 3, "num_microbatches": 2}, {}),
}
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp": ({"tp_size": 2}, {}),
    "tp, rows": ({"tp_size": 2}, ROWS),
    "tp, split sequences": ({"tp_size": 2, "enable_sequence_parallelism": True, "zero_stage": 1}, {}),
    "zb, rows": ({**PIPE, "pp_style": "zb"}, ROWS),
    "zbv, delayed": ({**PIPE, "pp_style": "zbv", "num_model_chunks": 2}, DELAYED),
    "1f1b, zero 1": ({**PIPE, "zero_stage": 1}, {}),
    "zero 1, delayed": ({"zero_stage": 1, "num_microbatches": 2}, DELAYED),
    "zero 2, rows": ({"zero_stage": 2}, ROWS),
    "tp and zb, delayed": ({"tp_size": 2, **PIPE, "pp_style": "zb"}, DELAYED),
    "tp and dualpipev": (
        {"tp_size": 2, "pp_size": 2, "num_microbatches": 4, "pp_style": "dualpipev", "num_model_chunks": 2},
        {},
    ),
    "tp and zero 2, delayed": (
        {"tp_size": 2, "zero_stage": 2, "enable_sequence_parallelism": True, "num_microbatches": 2},
        DELAYED,
    ),
}
RATE = 0.1


def steps_of(options: dict[str, Any]) -> int:
    """Until a history of two steps is full."""
    return 3 if options.get("scaling") == "delayed" else 2


def build(layers: int = 2) -> nn.Module:
    return zoo.build(MODEL, num_hidden_layers=layers, **SIZES)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    return zoo.inputs(MODEL, batch_size=8, seq_len=11 + step, seed=step)


def rows(batch: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, torch.Tensor]:
    return {name: value.chunk(parts)[part] for name, value in batch.items()}


def train_by_hand(model: nn.Module, options: dict[str, Any], parts: int) -> list[float]:
    """Batches in as many parts as the layout has, since scales are those of what is computed together."""
    recipe = Recipe(**options)
    compute_by_hand(model.model.layers, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    losses = []
    for step in range(steps_of(options)):
        optimizer.zero_grad()
        batch = batch_of(step)
        total = int((batch["labels"][:, 1:] != -100).sum())
        loss = 0.0
        for part in range(parts):
            mine = rows(batch, part, parts)
            share = model(**mine).loss * int((mine["labels"][:, 1:] != -100).sum()) / total
            share.backward()
            loss += float(share.detach())
        optimizer.step()
        recipe.end_step()
        losses.append(loss)
    return losses


def check_layouts(rank: int, world: int, names: list[str]) -> None:
    for name in names:
        settings, options = {**LAYOUTS, **MORE}[name]
        plugin = HybridParallelPlugin(
            precision="fp32", use_fp8=True, fp8_options={**options, "emulate": True}, **settings
        )
        reference = build(4 if settings.get("pp_style") in ("zbv", "dualpipev") else 2)
        model = copy.deepcopy(reference)
        booster = Booster(plugin=plugin)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9))
        with keep_float64():
            expected = train_by_hand(reference, options, plugin.dp_size * settings.get("num_microbatches", 1))
            losses = []
            for step in range(steps_of(options)):
                optimizer.zero_grad()
                mine = rows(batch_of(step), plugin.mesh.coordinate("dp"), plugin.dp_size)
                loss = booster.execute_pipeline(iter([mine]), boosted, None, optimizer)["loss"]
                gradients = optimizer.gradients()
                optimizer.step()
                losses.append(None if loss is None else float(loss))
        try:
            for one, other in zip(expected, losses, strict=True):
                assert other is None or other == pytest.approx(one, rel=1e-10), (losses, expected)
            compare_models(reference, boosted, coordinate=plugin.mesh.coordinate, gradients=gradients)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_layouts_equal_one_process() -> None:
    run_ranks(check_layouts, 2, list(LAYOUTS))


def saved_history(rank: int, world: int, settings: dict[str, Any]) -> torch.Tensor:
    """[linears, 3, steps] of what a checkpoint says after two steps. Lengths are those that two ranks divide: places
    that are filled up are computed too, and scales go by them.
    """
    plugin = HybridParallelPlugin(precision="fp32", use_fp8=True, fp8_options={**DELAYED, "emulate": True}, **settings)
    booster, model = Booster(plugin=plugin), build()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=RATE))
    with keep_float64():
        for step in range(2):
            optimizer.zero_grad()
            batch = zoo.inputs(MODEL, batch_size=8, seq_len=12 + 2 * step, seed=step)
            mine = rows(batch, plugin.mesh.coordinate("dp"), plugin.dp_size)
            booster.execute_pipeline(iter([mine]), boosted, None, optimizer)
            optimizer.step()
    return torch.tensor(list(optimizer.state_dict()["amax_history"].values()))


def test_checkpoints_hold_the_history_of_one_process() -> None:
    """Of gradients too, of which a rank sees more the more ranks there are that average them."""
    axis = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
    (alone,) = run_ranks(saved_history, 1, {})
    for settings in ({"tp_size": 2}, {"zero_stage": 1}, axis):
        for found in run_ranks(saved_history, 2, settings):
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=0)


@pytest.mark.sweep
@pytest.mark.parametrize("name", MORE)
def test_more_layouts_equal_one_process(name: str) -> None:
    settings = MORE[name][0]
    shared = settings.get("tp_size", 1) * settings.get("pp_size", 1)
    run_ranks(check_layouts, 4 if name.startswith("tp and") else max(2, shared), [name])


def losses(**settings: Any) -> list[float]:
    """Of 20 steps over 4 batches, in bf16 with masters in fp32."""
    booster = Booster(plugin=HybridParallelPlugin(**settings))
    model = zoo.build(MODEL, dtype=torch.float32, num_hidden_layers=2, **SIZES)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = []
    for step in range(20):
        result = booster.execute_pipeline(iter([batch_of(step % 4)]), model, None, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(result["loss"]))
    return found


def train_side_by_side(rank: int, world: int) -> dict[str, list[float]]:
    found = {"bf16": losses(precision="bf16")}
    for name, options in {"tensors": {}, "rows": ROWS, "delayed": DELAYED}.items():
        found[name] = losses(precision="fp8", fp8_options={**options, "emulate": True})
    return found


def test_training_in_it_stays_close_to_bf16() -> None:
    [found] = run_ranks(train_side_by_side, 1)
    expected = found.pop("bf16")
    assert expected[-1] < 0.9 * expected[0]
    for name, actual in found.items():
        # In the mean: how far the worst of the steps is off depends on the processor's products in bf16.
        distance = sum(abs(a - b) / b for a, b in zip(actual, expected, strict=True)) / len(expected)
        print(name, distance, expected[-1], actual[-1])
        assert 1e-3 < distance < 0.02, (name, distance)
