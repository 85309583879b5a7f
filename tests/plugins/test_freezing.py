"""Parameters that a script freezes for some steps, and trains again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, keep_float64, loss_of, run_ranks, zoo

NAME = "llama-causal-lm"


@keep_float64()
def freezing(rank: int, world: int, style: dict[str, Any]) -> None:
    """The first half, of which a whole stage is a part: nothing goes back to it then, after steps in which it did."""
    plugin = HybridParallelPlugin(
        precision="fp32", pp_size=2, num_microbatches=2, zero_stage=1, enable_metadata_cache=False, **style
    )
    reference = zoo.build(NAME, dtype=torch.float64, num_hidden_layers=4, tie_word_embeddings=False)
    booster, model = Booster(plugin=plugin), copy.deepcopy(reference)
    model, optimizer, *_ = booster.boost(model, adamw(model))
    plain = adamw(reference)
    for step, frozen in enumerate((False, True, False)):
        for side in (model, reference):
            for name, param in side.named_parameters():
                param.requires_grad_(not (frozen and any(part in name for part in ("embed", "layers.0.", "layers.1."))))
        batch = zoo.inputs(NAME, batch_size=4, seed=step)
        booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
        loss_of(reference(**batch)).backward()
        gradients = optimizer.gradients()
        compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=gradients, weights=False)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
        compare_models(reference, model, coordinate=plugin.mesh.coordinate, gradients=False)


@pytest.mark.parametrize("style", [{}, {"pp_style": "zbv", "num_model_chunks": 2}], ids=["1f1b", "zbv"])
def test_a_stage_may_freeze_and_train_again(style: dict[str, Any]) -> None:
    run_ranks(freezing, 2, style, timeout=60)
