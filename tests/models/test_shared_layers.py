"""Models that apply the same layer several times: stages get applications of it, and share its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from shardwright import Booster
from shardwright.models.layer_chain import Unit, find_units
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import keep_float64, run_ranks


def albert(groups: int, layers: int = 5, inside: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=61,
        embedding_size=12,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_hidden_layers=layers,
        num_hidden_groups=groups,
        inner_group_num=inside,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.AlbertForMaskedLM(config).double()


def test_applications_are_the_units() -> None:
    shared = "albert.encoder.albert_layer_groups"
    units = [Unit(f"{shared}.{group}", f"{shared}.{group}", call) for group, call in ((0, 0), (0, 1), (0, 2), (1, 0))]
    assert find_units(albert(2))[:4] == units
    assert [unit.call for unit in find_units(albert(1, 3, 1))] == [0, 1, 2]


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, 61, (5, 9 + step), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = mask[4, 3:] = 0
    labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.4), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(rank: int, world_size: int, cases: list[tuple[int, dict[str, Any]]]) -> None:
    """Steps of plain SGD with a large rate, so that the weights behind each are what the gradients were."""
    for groups, options in cases:
        reference, model = albert(groups), albert(groups)
        plugin = HybridParallelPlugin(pp_size=world_size, precision="fp32", num_microbatches=3, **options)
        with keep_float64():
            model, optimizer, *_ = Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), 0.5))
            plain = torch.optim.SGD(reference.parameters(), 0.5)
            for step in range(2):
                result = plugin.execute_pipeline(
                    iter([batch_of(step)]), model, lambda outputs, inputs: outputs.loss, optimizer, return_loss=True
                )
                expected = reference(**batch_of(step)).loss
                expected.backward()
                if result["loss"] is not None:
                    torch.testing.assert_close(result["loss"].double(), expected, rtol=1e-10, atol=0)
                optimizer.step()
                optimizer.zero_grad()
                plain.step()
                plain.zero_grad()
                weights = dict(reference.named_parameters())
                held = dict(model.unwrap().named_parameters())
                assert any("albert_layer_groups" in name for name in held) or "num_layers_per_stage" in options
                for name, param in held.items():
                    torch.testing.assert_close(param, weights[name], rtol=1e-10, atol=1e-12, msg=name)


def test_stages_share_layers() -> None:
    """One group over both stages, and two of which the first is cut; with stages between the first and the last, of
    which a rank holds two, and with layers that are recomputed.
    """
    recomputed = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=0.5)
    run_ranks(
        train,
        2,
        [
            (1, {"pp_style": "1f1b"}),
            (2, {"pp_style": "interleaved", "num_model_chunks": 2, "gradient_checkpoint_config": recomputed}),
            (2, {"pp_style": "zbv", "num_model_chunks": 2}),
            (1, {"pp_style": "zb", "num_layers_per_stage": [0, 5]}),
        ],
    )


def test_slices_of_sequences_are_refused() -> None:
    from shardwright.pipeline.cut.plan import plan_cut
    from shardwright.pipeline.settings import PipelineSettings

    with pytest.raises(ValueError, match="applies the same layer several times"):
        plan_cut(albert(1), PipelineSettings(num_microbatches=2, num_sequence_slices=2), 2)
