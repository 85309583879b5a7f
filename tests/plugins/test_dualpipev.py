"""Forwards and backwards at the same time, through the plugin: results, order of launches, errors, threads."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from habits import Habits
from hybrid_ranks import Layout, Run

from shardwright import Booster
from shardwright.pipeline.actions import Action, Kind
from shardwright.pipeline.timeline import Recorder
from shardwright.pipeline.two_at_once import THREAD
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import adamw, keep_float64, run_ranks, zoo

DUAL = {"pp_style": "dualpipev", "num_model_chunks": 2}


def layout(model: str, world: int, m: int, **others: Any) -> Layout:
    plugin = {"pp_size": world // others.get("tp_size", 1), **DUAL, "num_microbatches": m}
    known = {name: others.pop(name) for name in ("habits", "checkpointing", "overrides", "batch") if name in others}
    return Layout(model, world, {**plugin, **others}, steps=1, **{"batch": m + 2, **known})


def _trained(rank: int, world: int, layouts: list[Layout]) -> list[int]:
    """Train every layout beside one process; how often the turn changed on this rank."""
    found = []
    for one in layouts:
        with keep_float64():
            run = Run(rank, world, one)
            run.run()
        found.append(run.model.executor.runtime.pairs.changes)
    return found


def test_gradients_and_weights_are_those_of_one_process() -> None:
    clipped = Habits(clip="plugin", clip_at=0.05)
    sharded = [
        layout("llama-tied-causal-lm", 4, 5, tp_size=2, zero_stage=1, habits=clipped),
        layout("mixtral-causal-lm", 4, 4, tp_size=2),
        layout("llama-causal-lm", 4, 6, tp_size=2, zero_stage=3, checkpointing=True, overlap_p2p=False),
        layout("gpt2-causal-lm", 4, 3, tp_size=2, zero_stage=2, deferred_bytes=0),
    ]
    changes = run_ranks(_trained, 4, sharded)
    assert all(min(of_rank[:3]) > 20 for of_rank in changes), changes
    assert changes[0] == changes[1], "tensor-parallel ranks take the same turns"
    assert changes[2] == changes[3]
    assert run_ranks(_trained, 2, [layout("llama-causal-lm", 2, 5, checkpointing=True), layout("mixtral-causal-lm", 2, 4)]) == [[0, 0]] * 2


def test_four_stages_and_a_number_of_microbatches_that_they_do_not_divide() -> None:
    layers = {"num_hidden_layers": 9}
    run_ranks(_trained, 4, [layout("llama-causal-lm", 4, m, overrides=layers) for m in (1, 3, 9)])
