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
from shardwright.comm.turns import BACKWARD_THREAD
from shardwright.pipeline.planning.actions import COMPUTE, Kind
from shardwright.pipeline.timeline import Recorder
from shardwright.pipeline.two_at_once import TwoAtOnce
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import adamw, keep_float64, run_ranks, zoo
from shardwright.zero.param_guard import own_gradient

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
        layout(
            "mixtral-causal-lm",
            4,
            4,
            tp_size=2,
            gradient_checkpoint_config=PipelineGradientCheckpointConfig(selective_ratio=1.0),
        ),
        layout(
            "llama-causal-lm",
            4,
            6,
            tp_size=2,
            zero_stage=3,
            checkpointing=True,
            overlap_p2p=False,
            offload_activations=0.5,
        ),
        layout("gpt2-causal-lm", 4, 3, tp_size=2, zero_stage=2, deferred_bytes=0),
    ]
    changes = run_ranks(_trained, 4, sharded)
    assert all(min(of_rank[:3]) > 10 for of_rank in changes), changes
    assert changes[0] == changes[1], "tensor-parallel ranks take the same turns"
    assert changes[2] == changes[3]
    assert (
        run_ranks(_trained, 2, [layout("llama-causal-lm", 2, 5, checkpointing=True), layout("mixtral-causal-lm", 2, 4)])
        == [[0, 0]] * 2
    )


def test_four_stages_and_a_number_of_microbatches_that_they_do_not_divide() -> None:
    layers = {"num_hidden_layers": 9}
    run_ranks(_trained, 4, [layout("llama-causal-lm", 4, m, overrides=layers) for m in (3, 9)])


class Launches:
    """The all-reduces of this rank that were launched in pairs: by which half, and of how many numbers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pairs: list[list[tuple[str, int]]] = []
        self._in_pair = False
        reduce, run = dist.all_reduce, TwoAtOnce.run

        def note(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._in_pair and not tensor.is_meta:  # as where a module is asked for the shapes that it returns
                self.pairs[-1].append(
                    ("b" if threading.current_thread().name == BACKWARD_THREAD else "f", tensor.numel())
                )
            return reduce(tensor, *args, **kwargs)

        def note_pair(pair: TwoAtOnce, forward: Any, backward: Any) -> None:
            self.pairs.append([])
            self._in_pair = True
            run(pair, forward, backward)
            self._in_pair = False

        monkeypatch.setattr(dist, "all_reduce", note)
        monkeypatch.setattr(TwoAtOnce, "run", note_pair)


def _boosted(seed: int, **overrides: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = zoo.build("gpt2-causal-lm", dtype=torch.float64, **overrides).train()
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    booster = Booster(plugin=HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=5, precision="fp32", **DUAL))
    boosted, optimizer, *_ = booster.boost(model, adamw(model))
    return booster, boosted, optimizer


def _step(booster: Any, model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Loss and gradients of one batch."""
    torch.manual_seed(5)
    batch = zoo.inputs("gpt2-causal-lm", batch_size=7, seed=2)
    loss = booster.execute_pipeline(iter([batch]), model, None, optimizer)["loss"]
    owned = [own_gradient(param) for param in model.unwrap().parameters()]
    gradients = [gradient.clone() for gradient in owned if gradient is not None]
    optimizer.zero_grad()
    return [*([loss] if loss is not None else []), *gradients, torch.rand(2)]


@keep_float64()
def _in_turns(rank: int, world: int) -> list[list[tuple[str, int]]]:
    """With dropout and recomputation: bit by bit what the same schedule gives without pairs, in the order that turns
    prescribe.
    """
    settings = {"n_layer": 4, "resid_pdrop": 0.1, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    booster, model, optimizer = _boosted(1, **settings)
    executor = model.executor
    executor.runtime.recorder = Recorder()
    with pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch)
        found = _step(booster, model, optimizer)
    assert [thread.name for thread in threading.enumerate()].count(BACKWARD_THREAD) == 1
    timeline = executor.runtime.recorder.gather(executor.runtime.comm, executor.runtime.placement)
    for spans in timeline.ranks:
        pairs = [place for place, span in enumerate(spans) if span.action.kind is Kind.FB]
        assert all(spans[place][1:] == spans[place + 1][1:] for place in pairs)
        assert len(pairs) >= 3
        for place, (_, start, ready, end) in enumerate(spans):
            assert start <= ready <= end
            assert place == 0 or place - 1 in pairs or spans[place - 1].end <= start
    costs = timeline.mean_costs()
    assert min(costs.forward) > 0  # type: ignore[type-var, arg-type]
    ideal = timeline.ideal()  # no bound of what was measured: a slow action off the longest path raises the means
    assert [[span.action for span in spans if span.action.kind in COMPUTE] for spans in timeline.ranks] == [
        [span.action for span in spans] for spans in ideal.ranks
    ]
    executor.runtime.recorder = None

    executor._pairs = False
    executor._schedule.cache_clear()
    apart = _step(booster, model, optimizer)
    assert len(found) == len(apart) > 20
    assert all(torch.equal(one, other) for one, other in zip(found, apart, strict=True))
    del booster, model, optimizer, executor
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name == BACKWARD_THREAD for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert all(thread.name != BACKWARD_THREAD for thread in threading.enumerate()), "it ended with the model"
    return launches.pairs


def test_halves_alternate_in_the_same_order_on_tensor_parallel_ranks() -> None:
    results = run_ranks(_in_turns, 4)
    assert results[0] == results[1]
    assert results[2] == results[3]
    for pairs in results:
        assert pairs
        for launched in pairs:
            halves = "".join(half for half, _ in launched)
            first = min(halves.count("f"), halves.count("b"))
            assert first > 0
            assert halves.startswith("fb" * first), halves
            assert len(set(halves[2 * first :])) <= 1, halves
