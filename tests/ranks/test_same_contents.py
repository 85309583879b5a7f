"""Ranks of one replica that are given other numbers in batches of equal shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from failure_jobs import join

from shardwright import Booster
from shardwright.cluster import same_contents
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo

WORDS = r"compute every sample together .* in step 5 they were given other numbers in tensors of equal shapes"


def train(rank: int, world: int, sizes: dict[str, Any]) -> int:
    """Batches are equal but for one label in the fifth; returns the step in which that is refused."""
    join(rank, world)
    same_contents.EVERY = 3
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **sizes))
    model: Any = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=2)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(8):
        batch = zoo.inputs("llama-causal-lm", batch_size=2, seq_len=8, seed=step)
        if step == 4:
            batch["labels"][1, 5] = 7 + rank
        try:
            booster.execute_pipeline(iter([batch]), model, None, optimizer)
        except ValueError as error:
            with pytest.raises(ValueError, match=WORDS):
                raise error
            return step
    return -1


SPLIT = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}


def test_other_numbers_are_refused_a_step_later() -> None:
    assert run_ranks(train, 2, SPLIT, debug="OFF", timeout=40) == [5, 5]


@pytest.mark.sweep
@pytest.mark.parametrize("sizes", [{"pp_size": 2, "num_microbatches": 2}, {"tp_size": 2}], ids=["pp", "tp"])
def test_along_every_axis(sizes: dict[str, Any]) -> None:
    assert run_ranks(train, 2, sizes, debug="OFF", timeout=40) == [5, 5]
