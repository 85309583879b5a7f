"""`enable_jit_fused` where models see whole sequences and their layers parts: graphs are counted as lengths change, and
all equals one process without any.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from sequence_ranks import sgd
from test_sequence_layers import MODELS, SMALL, _made, batch_of
from torch import nn
from torch._dynamo.utils import counters

from shardwright import Booster
from shardwright.ops import layer_graphs
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import compare_models, keep_float64, run_ranks, zoo

ULYSSES: dict[str, Any] = {
    "enable_jit_fused": True,
    "enable_sequence_parallelism": True,
    "sequence_parallelism_mode": "all_to_all",
    "sp_size": 2,
}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
CKPT = {"gradient_checkpoint_config": PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)}
LENGTHS = (19, 14, 24, 17)  # one, two, none and three short of a multiple of four


def bert() -> nn.Module:
    """One answer for a sequence: all around the layers is whole."""
    config = transformers.BertConfig(
        **SMALL, intermediate_size=96, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return _made(config, transformers.AutoModelForSequenceClassification)


def t5() -> nn.Module:
    return zoo.build("t5-conditional-generation", num_layers=1, num_decoder_layers=1)


MADE = {**MODELS, "bert": bert, "one layer of t5": t5}
# with the graphs of one length: one for each kind of layers
Case = tuple[str, dict[str, Any], int]
CASES: list[Case] = [("one layer of t5", {**RING, **CKPT}, 2), ("bert", ULYSSES, 1)]
SWEPT: list[Case] = [
    *CASES,
    ("bert", {**RING, "zero_stage": 1}, 1),
    ("one layer of t5", {**ULYSSES, "zero_stage": 2}, 2),
    ("t5", RING, 4),
    ("bloom", RING, 1),
    ("bloom", {**ULYSSES, **CKPT}, 1),
    ("bart", {**RING, "zero_stage": 3}, 2),
    ("lfm2", {**ULYSSES, **CKPT}, 2),
    ("lfm2", RING, 2),
    ("dynamic", ULYSSES, 1),
]


def _batch(name: str, model: Any, length: int) -> dict[str, torch.Tensor]:
    batch = batch_of(model, length, length - 5)
    return {**batch, "labels": torch.tensor([0, 1, 1])} if name == "bert" else batch


def _train(rank: int, world: int, cases: list[tuple[Case, tuple[int, ...]]], backend: str) -> None:
    layer_graphs.backend = backend
    for (name, arguments, graphs), lengths in cases:
        counters.clear()
        with keep_float64():
            try:
                seen = _seen(name, arguments, lengths)
            except Exception as error:
                error.add_note(f"{name}, {arguments}")
                raise
        assert not counters["graph_break"], counters["graph_break"]
        assert seen == [graphs, *[2 * graphs] * (len(lengths) - 1)], (name, arguments, seen)


def _seen(name: str, arguments: dict[str, Any], lengths: tuple[int, ...]) -> list[int]:
    """The number of graphs after each of the lengths."""
    plain = MADE[name]()
    plugin = HybridParallelPlugin(precision="fp32", **arguments)
    booster = Booster(plugin=plugin)
    model: Any = copy.deepcopy(plain)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    assert optimizer is not None
    alone, seen = sgd(plain), []
    for length in lengths:
        batch = _batch(name, plain, length)
        expected, loss = plain(**batch).loss, model(**batch).loss
        expected.backward()
        booster.backward(loss, optimizer)
        seen.append(counters["stats"]["unique_graphs"])
        compare_models(
            plain,
            model,
            coordinate=plugin.mesh.coordinate,
            losses=(expected.detach(), loss.detach()),
            gradients=optimizer.gradients(),
            weights=False,
        )
        for each in (alone, optimizer):
            each.step()
            each.zero_grad()
    compare_models(plain, model, coordinate=plugin.mesh.coordinate, gradients=False)
    return seen


def test_layers_alone_equal_one_process() -> None:
    run_ranks(_train, 2, list(zip(CASES, (LENGTHS[:1], LENGTHS[:3]), strict=True)), "aot_eager")


@pytest.mark.sweep
@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", SWEPT, ids=str)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_more_layers_alone(case: Case, backend: str) -> None:
    run_ranks(_train, 2, [(case, LENGTHS)], backend, timeout=500)
