"""Attention of vision models by heads: what it computes for each head beside the projections goes along."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shardwright.models.example_inputs import loss_of
from shardwright.shardformer.attention import LocalCount
from shardwright.testing import run_ranks
from shardwright.testing.compare import compare_models
from shardwright.testing.exact import keep_float64
from shardwright.testing.matrix.subject import Subject, build
from tests.models.tp_ranks import shard

# Class, its settings, and what rank 0 of two holds of parameters (dim, size): whole heads, no part of one.
CASES: list[tuple[str, dict[str, Any], dict[str, tuple[int, int]]]] = [
    (
        "Swinv2ForImageClassification",
        {
            "embed_dim": 24,
            "depths": [1, 1],
            "num_heads": [3, 6],
        },  # unequal shares in the first stage, other heads in the second
        {
            "swinv2.encoder.layers.0.blocks.0.attention.self.logit_scale": (0, 2),
            "swinv2.encoder.layers.0.blocks.0.attention.self.continuous_position_bias_mlp.2.weight": (0, 2),
            "swinv2.encoder.layers.0.blocks.0.attention.output.dense.weight": (1, 16),
            "swinv2.encoder.layers.1.blocks.0.attention.self.logit_scale": (0, 3),
            "swinv2.encoder.layers.1.blocks.0.attention.output.dense.weight": (1, 24),
        },
    ),
]


def by_heads(rank: int, world_size: int, name: str, settings: dict[str, Any], held: dict[str, tuple[int, int]]) -> None:
    """Loss and gradients are those of one process."""
    built = build(Subject(name, settings=settings))
    sharded = shard(copy.deepcopy(built.model))
    losses = []
    with keep_float64():
        for model in (built.model, sharded):
            torch.manual_seed(0)
            loss = loss_of(model(**built.batch))
            loss.backward()
            losses.append(loss.detach())
    compare_models(built.model, sharded, coordinate=rank, losses=(losses[0], losses[1]), weights=False, tolerance=1e-10)
    for parameter, (dim, size) in held.items():
        whole = built.model.get_parameter(parameter).shape[dim]
        expected = size if rank == 0 else whole - size
        assert sharded.get_parameter(parameter).shape[dim] == expected, parameter


@pytest.mark.parametrize(("name", "settings", "held"), CASES, ids=[case[0] for case in CASES])
def test_attention_with_biases_per_head_is_sharded_by_heads(
    name: str, settings: dict[str, Any], held: dict[str, tuple[int, int]]
) -> None:
    run_ranks(by_heads, 2, name, settings, held, timeout=60)


def test_a_local_count_divides_features_as_the_whole_one() -> None:
    count = LocalCount(2, 6)
    assert (count, 96 // count, 4 * count, count // 2) == (2, 16, 8, 1)
    assert 96 // copy.deepcopy(count) == 16
