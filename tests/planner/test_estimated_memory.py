"""Memory that the search estimates is that of replays, which is that of real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config

from shardwright.cli.plan import _lazy, _load
from shardwright.planner.candidate import Layout, Task
from shardwright.planner.estimate import Estimate, Estimator
from shardwright.planner.machines import machine
from shardwright.planner.profile import Part, Parts, Profile
from shardwright.planner.rates import rates
from shardwright.planner.remade import remade
from shardwright.planner.search import Question
from shardwright.planner.stages import Ends
from shardwright.testing.estimates import compare

LAYER, TABLE = 1e8, 5e8
PARTS = Parts((Part(1e9, 0.0, 2e8, LAYER, {}, {}),), Part(0.0, 0.0, 1e8, 2 * TABLE, {}, {}))
PROFILE = Profile({1: PARTS}, (0,) * 16, 1, False)


def estimated(**changes: Any) -> Estimate:
    layout = Layout(
        **{"tp": 1, "pp": 2, "sp": 1, "dp": 1, "zero": 0, "style": "1f1b", "chunks": 1, "samples": 1, "count": 8}
        | changes
    )
    device = machine("h100")
    task = Task(device, 4e6, True, 2, 1.0, 2, ends=Ends(0.1, 2.0, 0.1), table=TABLE)
    return Estimator(task, rates(PROFILE, None, device, 1, layout.samples / layout.sp), layout).estimate(simulated=True)


def test_recomputing_ranks_are_fullest_where_the_gradient_of_the_table_is() -> None:
    static = (9 * LAYER + TABLE) * (2 + 4 + 4 + 8)  # stages of nine layers and of seven
    messages, inputs = 4 * 4e6, 9 * 4e6
    assert estimated(whole=1.0).memory == pytest.approx(static + inputs + (2 + 4) * TABLE + messages)
    # where weight gradients wait, it is added up when its turn comes: a layer needs more
    assert estimated(whole=1.0, style="zb").memory < static + 2 * inputs + 2e8 + 1e9 + messages + 1e7
    nothing = estimated().memory
    assert nothing == pytest.approx(static + 2 * 9 * 1e9 + 2e8 + messages)


GIVEN: dict[str, Any] = {"tp": 1, "pp": 1, "sp": 1, "dp": 2, "zero": 1, "style": "1f1b", "chunks": 1}


PIPE: dict[str, Any] = {"pp": 2, "count": 6}
V: dict[str, Any] = {"style": "zbv", "chunks": 2}

SMALL: dict[str, Any] = {
    "llama": (
        LlamaConfig,
        {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8},
        [{"samples": 4}, {"zero": 3}, {"zero": 2}, {**PIPE, "style": "zb", "whole": 1.0}, {**PIPE, "zero": 2}],
    ),
    "bert": (
        BertConfig,
        {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "architectures": ["BertForMaskedLM"]},
        [{"samples": 4}],
    ),
    "t5": (
        T5Config,
        {
            "d_model": 256,
            "d_ff": 1024,
            "d_kv": 32,
            "num_heads": 8,
            "num_layers": 3,
            "num_decoder_layers": 5,
            "decoder_start_token_id": 0,
            "architectures": ["T5ForConditionalGeneration"],
            "n_positions": 128,
        },
        [{"zero": 3}, {"pp": 2, "count": 8}],
    ),
    "gpt2": (
        GPT2Config,
        {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 64, "vocab_size": 30000},
        [
            {"whole": 1.0},
            {"pp": 2, "dp": 1, "zero": 0},
            {"zero": 3},
            {"zero": 2},
            {**PIPE, **V},
            {**PIPE, **V, "zero": 3},
        ],
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_of_small_models_with_large_tables(name: str) -> None:
    """One tensor-parallel rank computes the loss as no other does, and BERT's needs more where it is weighted; a
    backward ends with the gradients of the table; both ends of a pipeline hold that of GPT-2; at ZeRO-3 what is
    gathered, and the room for gradients on their way, have the size of the largest unit, at ZeRO-2 no more than there
    is to reduce, and in pipelines gradients in fp32 wait for their bucket; logits are gone when a weight gradient that
    has waited is computed; T5's encoder has layers that are none of its decoder's, too few for a run of equal ones.
    """
    kind, sizes, changes = SMALL[name]
    config: Any = kind(**{"vocab_size": 8000, **sizes})
    build = remade(lambda: _lazy(config))
    question = Question(
        build, lambda model: torch.optim.AdamW(model.parameters()), machine("h100"), 8, 4, sizes.get("n_positions", 256)
    )
    layouts = [Layout(**{**GIVEN, "samples": 1, "count": 2, **each}) for each in changes]
    for one in compare(question, layouts):
        assert abs(one.off) <= 0.02, one


def test_of_cpu_ranks_what_arrives_for_a_bucket_counts() -> None:
    """No device adds up there what others send: it has room of its own, of stage 1 too."""
    build = remade(lambda: _lazy(_load("llama-tiny")))
    device = replace(machine("h100"), cores=2, device="cpu")
    question = Question(build, lambda model: torch.optim.SGD(model.parameters()), device, 4, 16, 32, "fp32")
    given = {**GIVEN, "dp": 4, "samples": 4, "count": 1}
    for one in compare(question, [Layout(**given), Layout(**{**given, "zero": 2})]):
        assert abs(one.off) <= 0.02, one


def _layouts() -> list[Layout]:
    def made(**changes: Any) -> Layout:
        return Layout(**{**GIVEN, "samples": 1, "count": 4, **changes})

    two, four = {"pp": 2, "count": 8}, {"pp": 4, "count": 8}
    kinds = (two, four, {**two, "style": "zb"}, {**two, "style": "interleaved", "chunks": 2})
    piped = [{**kind, "whole": share} for kind in kinds for share in (0.0, 0.5, 1.0)]
    piped += [{**two, "style": "zbv", "chunks": 2, "whole": share} for share in (0.0, 1.0)]
    piped += [{**four, "tp": 2, "whole": 1.0}, {**two, "samples": 2, "whole": 1.0}]
    alone = [{}, {"whole": 1.0}, {"tp": 2, "whole": 1.0}, {"whole": 0.5}]
    return [made(**changes) for changes in alone + piped]


@pytest.mark.sweep
@pytest.mark.timeout(3600)
def test_of_layouts_with_and_without_recomputation() -> None:
    config = _load("llama-8b")
    config.num_hidden_layers = 16
    build = remade(lambda: _lazy(config))
    question = Question(build, lambda model: torch.optim.AdamW(model.parameters()), machine("h100"), 8, 8, 4096)
    found = list(compare(question, _layouts()))
    assert len(found) >= 20
    for one in found:
        assert abs(one.off) <= 0.03, one
