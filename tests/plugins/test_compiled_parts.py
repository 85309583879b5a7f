"""`enable_jit_fused` where models see whole sequences and their layers parts: graphs are counted as lengths change, and
all equals one process without any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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


def answered(model: Any, length: int) -> dict[str, torch.Tensor]:
    batch = batch_of(model, length)
    return {**batch, "labels": torch.tensor([0, 1, 1])}


def ordinary(model: Any, length: int) -> dict[str, torch.Tensor]:
    return batch_of(model, length, length - 5)


def t5() -> nn.Module:
    return zoo.build("t5-conditional-generation", num_layers=1, num_decoder_layers=1)


Case = tuple[Callable[[], nn.Module], Callable[[Any, int], dict[str, torch.Tensor]], dict[str, Any], int]
# with the graphs of one length: one for each kind of layers
CASES: list[Case] = [(t5, ordinary, {**RING, **CKPT}, 2), (bert, answered, ULYSSES, 1)]
SWEPT: list[Case] = [
    *CASES,
    (bert, answered, {**RING, "zero_stage": 1}, 1),
    (t5, ordinary, {**ULYSSES, "zero_stage": 2}, 2),
    (MODELS["t5"], ordinary, RING, 4),
    (MODELS["bloom"], ordinary, RING, 1),
    (MODELS["bloom"], ordinary, {**ULYSSES, **CKPT}, 1),
    (MODELS["bart"], ordinary, {**RING, "zero_stage": 3}, 2),
    (MODELS["lfm2"], ordinary, {**ULYSSES, **CKPT}, 2),
    (MODELS["lfm2"], ordinary, RING, 2),
    (MODELS["dynamic"], ordinary, ULYSSES, 1),
]


def _train(rank: int, world: int, cases: list[Case], backend: str) -> None:
    layer_graphs.backend = backend
    for made, batches, arguments, graphs in cases:
        counters.clear()
        with keep_float64():
            try:
                seen = _seen(made(), batches, arguments)
            except Exception as error:
                error.add_note(f"{made}, {arguments}")
                raise
        assert not counters["graph_break"], counters["graph_break"]
        assert seen == [graphs, *[2 * graphs] * (len(LENGTHS) - 1)], (made, arguments, seen)


def _seen(plain: nn.Module, batches: Callable[[Any, int], dict[str, torch.Tensor]], arguments: dict[str, Any]) -> Any:
    """The number of graphs after each of the lengths."""
    plugin = HybridParallelPlugin(precision="fp32", **arguments)
    booster = Booster(plugin=plugin)
    model: Any = copy.deepcopy(plain)
    model, optimizer, *_ = booster.boost(model, sgd(model))
    assert optimizer is not None
    alone, seen = sgd(plain), []
    for length in LENGTHS:
        batch = batches(plain, length)
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
    run_ranks(_train, 2, CASES, "aot_eager")


@pytest.mark.sweep
@pytest.mark.timeout(560)
@pytest.mark.parametrize("case", SWEPT, ids=lambda case: f"{getattr(case[0], '__name__', '')} {case[2]}")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_more_layers_alone(case: Case, backend: str) -> None:
    run_ranks(_train, 2, [case], backend, timeout=500)
