"""A step leaves no tensors in reference cycles: their memory would stay until Python happens to collect garbage."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, run_ranks, zoo

LAYOUTS: list[dict[str, Any]] = [
    {"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2, "num_microbatches": 4, "zero_stage": 1},
    {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 4},
    {"tp_size": 2, "zero_stage": 2},
    {"zero_stage": 3},
]


def _train(rank: int, world: int) -> None:
    for layout in LAYOUTS:
        _train_laid_out(layout)


def _train_laid_out(layout: dict[str, Any]) -> None:
    plugin = HybridParallelPlugin(precision="bf16", max_norm=1.0, **layout)
    model = zoo.build("llama-causal-lm", num_hidden_layers=4)
    booster = Booster(plugin=plugin)
    boosted, optimizer, *_ = booster.boost(model, adamw(model))

    def step(seq_len: int) -> None:
        batch = zoo.inputs("llama-causal-lm", batch_size=8, seq_len=seq_len)
        if "pp_size" in layout:
            booster.execute_pipeline(iter([batch]), boosted, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(boosted(**batch).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    step(12)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        step(12)
        step(10)  # what happens once per shape happens again
        gc.collect()
        found = [kept.shape for kept in gc.garbage if isinstance(kept, torch.Tensor) and not kept.is_meta]
        assert not found, (layout, found)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.timeout(120)
def test_steps_leave_no_tensors_to_the_garbage_collector() -> None:
    run_ranks(_train, 2, timeout=90)
