"""What tensor-parallel tests run on every rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

from shardwright.shardformer import ShardConfig, ShardFormer
from shardwright.testing import zoo
from shardwright.testing.compare import check_complete, compare_models
from shardwright.testing.exact import keep_float64
from shardwright.testing.train import adamw, train_steps

STEPS = 2


LAYERS = {"gpt2": {"n_layer": 2}, "t5": {"num_layers": 2, "num_decoder_layers": 2}}


def overrides(name: str, **own: Any) -> dict[str, Any]:
    """Two layers are enough here. Token classifiers of some families have a dropout of 0.1 that their config does
    not mention.
    """
    settings = dict(LAYERS.get(zoo.entry(name).family, {"num_hidden_layers": 2}))
    if name.endswith("token-classification"):
        settings["classifier_dropout"] = 0.0
    return {**settings, **own}


def shard(model: nn.Module, **config: Any) -> nn.Module:
    """Over all ranks; a small multiple lets a vocabulary of 101 end in padding on the last rank only."""
    return ShardFormer(ShardConfig(**{"make_vocab_size_divisible_by": 8, **config})).shard_model(model)


def train_against_reference(
    rank: int,
    world_size: int,
    names: list[str],
    dtype: torch.dtype = torch.float64,
    settings: dict[str, Any] | None = None,
    **shard_config: Any,
) -> list[str]:
    """AdamW steps of every model against plain transformers: losses, last gradients, weights. Returns what
    differs.
    """
    problems = []
    for name in names:
        arguments = overrides(name, **(settings or {}))
        reference, model = zoo.build(name, dtype=dtype, **arguments), zoo.build(name, dtype=dtype, **arguments)
        batches = [zoo.inputs(reference, seed=seed) for seed in range(STEPS)]
        model = shard(model, **shard_config)
        with keep_float64() if dtype is torch.float64 else contextlib.nullcontext():
            expected = train_steps(reference, adamw(reference), batches)
            actual = train_steps(model, adamw(model), batches)
        report = compare_models(reference, model, coordinate=rank, losses=(expected, actual), check=False)
        try:
            report.check()
            check_complete(reference, [report.held])
        except AssertionError as error:
            problems.append(f"{name}: {error}")
    return problems
