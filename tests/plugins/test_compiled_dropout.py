"""Dropout in compiled layers: layouts draw in graphs what they draw without, and ranks stay in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters

from shardwright import Booster
from shardwright.ops import compiled_numbers, layer_graphs
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import adamw, keep_float64, run_ranks, zoo

GPT2 = {"n_layer": 2, "resid_pdrop": 0.2, "attn_pdrop": 0.3}
BERT = {"num_hidden_layers": 2, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
TP = {"tp_size": 2}
SPLIT = {**TP, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
CKPT = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)}
ULYSSES = {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
# model, overrides of its config, settings, graphs
Case = tuple[str, dict[str, Any], dict[str, Any], int]
CASES: list[Case] = [
    ("gpt2-causal-lm", GPT2, {**SPLIT, **CKPT}, 2),
]
SWEPT: list[Case] = [
    ("gpt2-causal-lm", GPT2, {**TP, **CKPT}, 2),
    ("bert-masked-lm", BERT, SPLIT, 2),
    ("bert-masked-lm", BERT, {**TP, "zero_stage": 0}, 2),
    ("gpt2-causal-lm", GPT2, SPLIT, 2),
    ("gpt2-causal-lm", GPT2, {**SPLIT, "sequence_parallelism_mode": "ring", "enable_sequence_overlap": True}, 2),
    ("llama-causal-lm", {"num_hidden_layers": 2, "attention_dropout": 0.3}, TP, 2),
    ("gpt2-causal-lm", GPT2, RING, 2),
    ("gpt2-causal-lm", GPT2, ULYSSES, 2),
]


def _train(name: str, overrides: dict[str, Any], settings: dict[str, Any]) -> tuple[list[Any], torch.Tensor]:
    """Losses by step and the weights of this rank behind them; numbers that are drawn then."""
    model = zoo.build(name, dtype=torch.float64, **overrides)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **settings))
    model, optimizer, *_ = booster.boost(model, adamw(model))
    torch.manual_seed(5)
    seen: list[Any] = []
    for step, length in enumerate((11, 13, 12)):
        batch = zoo.inputs(name, batch_size=3, seq_len=length, seed=step, dtype=torch.float64, **overrides)
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    seen.append({name: param.detach() for name, param in model.named_parameters()})
    return seen, torch.rand(3)


def _compare(rank: int, world: int, cases: list[Case], backend: str) -> None:
    layer_graphs.backend = backend
    for name, overrides, settings, graphs in cases:
        with keep_float64():
            expected, drawn = _train(name, overrides, settings)
            counters.clear()
            found, also_drawn = _train(name, overrides, {**settings, "enable_jit_fused": True})
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(drawn, also_drawn), name
        everywhere = [torch.empty_like(drawn) for _ in range(world)]
        dist.all_gather(everywhere, also_drawn)
        assert "sp_size" in settings or torch.equal(*everywhere), name
        assert not counters["graph_break"], counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == graphs, (name, settings, counters["stats"])


def test_graphs_draw_what_layers_draw() -> None:
    run_ranks(_compare, 2, CASES, "aot_eager")


class Others:
    """Numbers of another seed."""

    kept: torch.Tensor | None = None

    def switch(self, to: str) -> None:
        if to == compiled_numbers.OPEN and self.kept is None:
            self.kept = torch.get_rng_state()
            torch.manual_seed(77)
        elif to == compiled_numbers.CLOSE and self.kept is not None:
            torch.set_rng_state(self.kept)
            self.kept = None

    def mark(self) -> None: ...

    def go_back(self, mark: None) -> None: ...


def _draws(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Three that do not depend on each other, one of them of other numbers."""
    first = F.dropout(x * 2, 0.5)
    opened = compiled_numbers.switch_numbers(x @ weight, "others", compiled_numbers.OPEN)
    inside = F.dropout(compiled_numbers.switch_numbers(opened.sin(), "others", compiled_numbers.OPEN), 0.5)
    closed = compiled_numbers.switch_numbers(inside @ weight, "others", compiled_numbers.CLOSE)
    return [first, closed, F.dropout(x.cos(), 0.5), F.dropout(closed, 0.5)]


def test_inductor_keeps_the_order_of_draws() -> None:
    compiled_numbers.name_numbers("others", Others())
    inputs = [torch.rand(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    seen = []
    for function in (_draws, torch.compile(_draws, backend=layer_graphs.compile_graph, fullgraph=True)):
        torch.manual_seed(5)
        outputs = function(*inputs)
        seen.append((outputs, torch.autograd.grad(sum((each**2).sum() for each in outputs), inputs), torch.rand(3)))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-10, atol=1e-10)


@pytest.mark.sweep
@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", SWEPT + CASES, ids=lambda case: f"{case[0]} {case[2]}")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_more_graphs_draw_what_layers_draw(case: Case, backend: str) -> None:
    run_ranks(_compare, 2, [case], backend, timeout=500)
