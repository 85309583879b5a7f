"""Selective recomputation in layouts of HybridParallelPlugin, against one process without any."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from habits import Habits
from hybrid_ranks import Layout, run_layout

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import adamw, run_ranks, zoo

ALL = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(selective_ratio=1.0)}
BOTH = {
    "gradient_checkpoint_config": PipelineGradientCheckpointConfig(
        num_ckpt_layers_per_stage=[1, 0], num_selective_layers_per_stage=[1, 2]
    )
}
PIPE = {"pp_size": 2, "num_microbatches": 3}
ZBV = {**PIPE, "pp_style": "zbv", "num_model_chunks": 2}
FOUR = {"num_hidden_layers": 4}
LAYOUTS = [
    Layout("llama-causal-lm", 2, {"tp_size": 2, "zero_stage": 1, **ALL}, steps=1, calls=True),
    Layout("llama-causal-lm", 2, {"zero_stage": 3, **ALL}, steps=1),
    Layout("llama-tied-causal-lm", 4, {"tp_size": 2, **PIPE, **BOTH}, FOUR, steps=1),
    Layout("llama-causal-lm", 4, {"zero_stage": 3, **ZBV, **ALL}, FOUR, steps=1),
    Layout("gpt2-causal-lm", 4, {"tp_size": 2, **ZBV, **ALL}, {"n_layer": 4}, steps=1),
    Layout("llama-causal-lm", 2, {**PIPE, "num_microbatches": 4, "offload_activations": 1.0, **ALL}, FOUR, steps=1),
    Layout("bert-masked-lm", 2, {**PIPE, "zero_stage": 1, **ALL}, steps=1),
    Layout("qwen3-moe-causal-lm", 4, {"tp_size": 2, **PIPE, "pp_style": "zb", **ALL}, steps=1),
    Layout("mixtral-causal-lm", 2, {**PIPE, "zero_stage": 3, **ALL}, steps=1),
    Layout("llama-causal-lm", 2, {"tp_size": 2, **ALL}, steps=1, habits=Habits(lora=True)),
    Layout("llama-causal-lm", 2, {**PIPE, "zero_stage": 1, **ALL}, steps=1, dtype="fp32", habits=Habits(half="bf16")),
]


def _run(rank: int, world: int, layouts: list[Layout]) -> None:
    for layout in layouts:
        run_layout(rank, world, layout)


@pytest.mark.parametrize("world", [2, 4])
def test_layouts(world: int) -> None:
    run_ranks(_run, world, [layout for layout in LAYOUTS if layout.world == world])


class _Calls:
    """Collectives and messages of a step, counted at torch.distributed, where nothing changes what runs."""

    NAMES = (
        "all_reduce",
        "all_gather_single",
        "all_gather_into_tensor",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
    )

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Counter[str]:
        self._originals = {
            name: getattr(torch.distributed, name) for name in self.NAMES if hasattr(torch.distributed, name)
        }
        for name, original in self._originals.items():
            setattr(torch.distributed, name, self._counting(name, original))
        return self.calls

    def _counting(self, name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_: Any) -> None:
        for name, original in self._originals.items():
            setattr(torch.distributed, name, original)


def _collectives(rank: int, world: int, pipe: dict[str, Any]) -> list[int]:
    found = []
    for config in (None, PipelineGradientCheckpointConfig(selective_ratio=1.0), PipelineGradientCheckpointConfig(1.0)):
        booster = Booster(
            plugin=HybridParallelPlugin(tp_size=2, precision="fp32", gradient_checkpoint_config=config, **pipe)
        )
        model = zoo.build("llama-causal-lm", dtype=torch.float32, **FOUR)
        model, optimizer, *_ = booster.boost(model, adamw(model))
        batch = zoo.inputs("llama-causal-lm", batch_size=3, seq_len=9)
        for _ in range(2):  # the first step finds things out
            with _Calls() as calls:
                booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer)
        found.append(calls["all_reduce"])
    return found


@pytest.mark.parametrize("pipe", [{}, ZBV], ids=["alone", "zbv"])
def test_no_collective_of_tensor_parallelism_runs_twice(pipe: dict[str, Any]) -> None:
    for plain, kept, again in run_ranks(_collectives, 2 * pipe.get("pp_size", 1), pipe):
        assert kept == plain < again


def _runs_of_layers(rank: int, world: int) -> None:
    """A model that the script calls itself recomputes the same layers, also where its own checkpointing was on
    before boost.
    """
    some = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1], num_selective_layers_per_stage=[2])
    for config, own, expected in (
        (some, False, [2, 2, 2, 1]),
        (some, True, [2, 2, 2, 1]),
        (None, True, [2] * 4),
        (None, False, [1] * 4),
    ):
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", gradient_checkpoint_config=config))
        model = zoo.build("llama-causal-lm", dtype=torch.float32, **FOUR)
        if own:
            model.gradient_checkpointing_enable()
        model, optimizer, *_ = booster.boost(model, adamw(model))
        batch = zoo.inputs("llama-causal-lm", batch_size=3, seq_len=9)
        calls: Counter[int] = Counter()
        for place, layer in enumerate(model.unwrap().model.layers):
            layer.mlp.register_forward_pre_hook(lambda *_, place=place, calls=calls: calls.update([place]))
        for run in ("called", "executed"):
            calls.clear()
            if run == "called":
                booster.backward(model(**batch).loss, optimizer)
            else:
                booster.execute_pipeline(iter([batch]), model, lambda outputs, inputs: outputs.loss, optimizer)
            assert [calls[place] for place in range(4)] == expected, (config, own, run)
        with torch.no_grad():
            model(**batch)


def test_without_a_pipeline_the_same_layers_are_recomputed() -> None:
    run_ranks(_runs_of_layers, 1)


def _caches(rank: int, world: int) -> None:
    """Models make a cache of keys and values unless a config says otherwise; layers that run again must not write to
    it.
    """
    for config in (
        PipelineGradientCheckpointConfig(1.0),
        PipelineGradientCheckpointConfig(num_selective_layers_per_stage=[1]),
        None,
    ):
        for name in ("llama-causal-lm", "gpt2-causal-lm"):
            booster = Booster(plugin=HybridParallelPlugin(precision="fp32", gradient_checkpoint_config=config))
            plain, model = (zoo.build(name, use_cache=True) for _ in range(2))
            if config is None:
                model.gradient_checkpointing_enable()
            model, optimizer, *_ = booster.boost(model, adamw(model))
            batch = zoo.inputs(name, batch_size=3, seq_len=9)
            ids = batch["input_ids"]
            for mode in (True, False):
                model.train(mode)
                for param in (*plain.parameters(), *model.parameters()):
                    param.grad = None
                loss, wanted = (net(**batch, use_cache=True).loss for net in (model, plain.train(mode)))
                booster.backward(loss, optimizer)
                wanted.backward()
                torch.testing.assert_close(loss, wanted)
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
            cache, filled = (net(ids[:, :4]).past_key_values for net in (model, plain))
            continued, wanted = (
                net(ids[:, 4:], past_key_values=past).logits for net, past in ((model, cache), (plain, filled))
            )
            torch.testing.assert_close(continued, wanted)


def test_layers_that_run_again_write_to_no_cache() -> None:
    run_ranks(_caches, 1)
