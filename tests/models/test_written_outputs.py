"""A decoder that writes to its encoder's output, in place: every stage of it has to, and to what was returned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, compare_models, run_ranks
from shardwright.testing.exact import keep_float64

SAMPLES, HEARD, WORDS = 4, 1600, 6


def build() -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    heard = small | {"num_key_value_heads": 2, "sliding_windows": ((4, 1), (4, 0)), "max_position_embeddings": 64}
    config = transformers.MoonshineStreamingConfig(
        **small,
        encoder_config=heard,
        vocab_size=31,
        max_position_embeddings=64,
        pad_token_id=0,
        decoder_start_token_id=1,
        num_key_value_heads=2,
    )
    with keep_float64():
        return transformers.MoonshineStreamingForConditionalGeneration(config).double().train()


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heard = torch.randn(SAMPLES, HEARD, generator=generator, dtype=torch.float64)
    mask = torch.ones(SAMPLES, HEARD, dtype=torch.long)
    mask[1, 960:] = 0
    labels = torch.randint(3, 31, (SAMPLES, WORDS), generator=generator)
    labels[0, 2:] = labels[3, 5:] = -100
    return {"input_values": heard, "attention_mask": mask, "labels": labels}


def trained(rank: int, world: int, layouts: list[dict[str, Any]]) -> None:
    with keep_float64():
        for layout in layouts:
            plain = build()
            model = copy.deepcopy(plain)
            plugin = HybridParallelPlugin(
                pp_size=world, num_microbatches=2, precision="fp32", example_inputs=batch(5), **layout
            )
            booster = Booster(plugin=plugin)
            boosted, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
            step: Any = adamw(plain.parameters())
            for seed in (1, 2):
                want = plain(**batch(seed), use_cache=False).loss
                want.backward()
                given = booster.execute_pipeline(iter([batch(seed)]), boosted, None, optimizer, return_loss=True)
                if given["loss"] is not None:
                    torch.testing.assert_close(given["loss"], want, rtol=1e-12, atol=1e-12)
                gradients = optimizer.gradients()
                compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=gradients, weights=False)
                step.step()
                optimizer.step()
                step.zero_grad()
                optimizer.zero_grad()
            compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)


def test_every_stage_writes_to_what_was_returned() -> None:
    run_ranks(trained, 3, layouts=[{}])


@pytest.mark.sweep
def test_every_stage_writes_to_what_was_returned_in_other_layouts() -> None:
    several = [{"pp_style": "interleaved", "num_model_chunks": 2}, {"pp_style": "zbv", "num_model_chunks": 2}]
    run_ranks(trained, 2, layouts=[*several, {"num_layers_per_stage": [3, 1]}])
    run_ranks(trained, 4, layouts=[{}])
