"""What a step dispatches beside the operators of a loop by hand: nothing in the layers where every size is 1, and
what the collectives of a layout need where it is not. Views and allocations are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.testing.operators import counted, more_than, per_layer

NAME = "llama-causal-lm"
SP: dict[str, Any] = {"enable_sequence_parallelism": True}

# What a step of the plugin has beside that of a loop.
GUARDS = {
    # ids and labels are looked at on the host, before they travel (`plugins.data.input_limits`)
    "aminmax": 2,
    "eq": 1,
    "masked_fill": 1,
    # gradients are not set to zero, but what lies between them is: the first ones of 2 layers, and of 3 parameters
    # around them, are copied
    "add_": -21,
    "copy_": 21,
}
# The first gradients of a step are copied, not added to zeros.
FIRST = {"add_": -9, "copy_": 9}
# The layers at size 1: nothing else.
AT_SIZE_1: list[tuple[dict[str, Any], bool, dict[str, float]]] = [
    ({}, False, FIRST),
    ({}, True, FIRST),
    ({"zero_stage": 1, "max_norm": 1.0}, False, FIRST),
    ({"zero_stage": 2}, False, {"add_": -9}),  # all of a bucket at once
    ({"precision": "bf16"}, False, FIRST),  # to fp32 at the same time
    ({"precision": "bf16", "zero_stage": 2}, False, {"add_": -9}),
]
# What a layer has more on each of two ranks.
ON_2_RANKS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({}, FIRST),  # gradients are reduced in place, in buckets that do not know of layers
    ({"zero_stage": 1}, FIRST),
    ({"zero_stage": 2}, {"add_": -9}),
    (
        {"zero_stage": 3},
        {
            # two gathers of the weights, and one sum of the gradients into their shard: over gloo messages and copies
            "c10d.send": 3,
            "c10d.recv_": 3,
            "copy_": 3,
            "_foreach_copy_": 1,  # gradients into the layer's flat buffer
            "_foreach_zero_": 1,  # what lies between gradients there, some elements
            "set_": 2,  # the weights' memory is given back
            "add_": -8,  # gradients are not added one by one but in the shard
        },
    ),
    # Two sums in forward and two in backward, those of forward in copies of what somebody else may hold. One copy that
    # the loop makes falls away.
    ({"tp_size": 2}, {**FIRST, "c10d.allreduce_": 4, "clone": 1}),
    (
        # Four gathers and four scatters: one copy each to put parts along tokens one after the other, and back.
        {"tp_size": 2, **SP, "sequence_parallelism_mode": "split_gather"},
        {"c10d._allgather_base_": 4, "c10d._reduce_scatter_base_": 4, "clone": 7, "copy_": 4 + 9, "add_": -9},
    ),
    (
        # Queries, keys, values and outputs are traded, there and back: one copy before each, one join behind it. Two
        # copies more where autograd hands transposed gradients on.
        {"sp_size": 2, **SP, "sequence_parallelism_mode": "all_to_all"},
        {**FIRST, "c10d.alltoall_base_": 8, "clone": 10, "cat": 8},
    ),
]


def built(name: str, layers: int, dtype: torch.dtype) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of so many layers, and a batch without a mask."""
    if name == "gemma2":
        from transformers import Gemma2Config, Gemma2ForCausalLM

        torch.manual_seed(0)
        config = Gemma2Config(
            **{**zoo.config(NAME).to_diff_dict(), "num_hidden_layers": layers, "sliding_window": 8, "head_dim": 12}
        )
        return Gemma2ForCausalLM(config).to(dtype), batch(NAME, dtype)
    return zoo.build(name, dtype=dtype, num_hidden_layers=layers), batch(name, dtype)


def batch(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    made = zoo.inputs(name, batch_size=4, seq_len=16, seed=0, dtype=dtype)
    made.pop("attention_mask", None)
    return made


def warm(step: Callable[[], None]) -> Counter[str]:
    for _ in range(2):
        step()
    return Counter({name: number for name, number in counted(step).items() if not name.startswith("profiler")})


def by_hand(layers: int, dtype: torch.dtype = torch.float32, name: str = NAME) -> Counter[str]:
    model, inputs = built(name, layers, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return warm(step)


def by_plugin(layers: int, options: dict[str, Any], pipeline: bool, name: str = NAME) -> Counter[str]:
    model, inputs = built(name, layers, torch.float32)
    booster = Booster(plugin=HybridParallelPlugin(**{"precision": "fp32", **options}))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))

    def step() -> None:
        if pipeline:
            booster.execute_pipeline(iter([inputs]), model, lambda outputs, _: outputs.loss, optimizer)
        else:
            booster.backward(model(**inputs).loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return warm(step)


def in_layers(options: dict[str, Any], pipeline: bool, hand: dict[str, float], name: str = NAME) -> dict[str, float]:
    """What a layer, computed once per microbatch, has more than one of the loop."""
    stages, microbatches = options.get("pp_size", 1), options.get("num_microbatches", 1)
    fewer, more = (by_plugin(layers * stages, options, pipeline, name) for layers in (2, 4))
    wanted = {name: number * microbatches for name, number in hand.items()}
    return more_than(per_layer(fewer, more, 2), wanted)


def differences(rank: int, world: int, cases: list[tuple[dict[str, Any], bool]]) -> tuple[list[dict[str, float]], Any]:
    """Of the layers in each case, and of what is around them."""
    fewer, more = by_hand(2), by_hand(4)
    hands = {"fp32": per_layer(fewer, more, 2)}
    if any(options.get("precision") == "bf16" for options, _ in cases):
        hands["bf16"] = per_layer(by_hand(2, torch.bfloat16), by_hand(4, torch.bfloat16), 2)
    besides = more_than(by_plugin(2, {}, False), fewer) if world == 1 else None
    found = [in_layers(options, pipeline, hands[options.get("precision", "fp32")]) for options, pipeline in cases]
    return found, besides


def test_nothing_is_added_at_size_1() -> None:
    [(found, besides)] = run_ranks(differences, 1, [case[:2] for case in AT_SIZE_1], timeout=120)
    assert found == [expected for *_, expected in AT_SIZE_1]
    assert besides == GUARDS


def test_layers_have_what_their_collectives_need() -> None:
    results = run_ranks(differences, 2, [(options, False) for options, _ in ON_2_RANKS], timeout=240)
    for found, _ in results:
        for (options, expected), more in zip(ON_2_RANKS, found, strict=True):
            assert more == expected, options


# and how many parameters a layer has
OTHERS = {"gemma2": 11, "opt-causal-lm": 16, "vit-image-classification": 16}


def of_others(rank: int, world: int, cases: list[dict[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """By model, what a layer has more than one of the loop, in each case."""
    found = {}
    for name in names:
        hand = per_layer(by_hand(2, name=name), by_hand(4, name=name), 2)
        found[name] = [in_layers(options, "num_microbatches" in options, hand, name) for options in cases]
    return found


def test_nothing_is_added_to_layers_of_other_families() -> None:
    cases: list[dict[str, Any]] = [{}, {"num_microbatches": 2}, {"zero_stage": 1, "max_norm": 1.0}]
    [found] = run_ranks(of_others, 1, cases, OTHERS, timeout=120)
    first = {name: {"add_": -number, "copy_": number} for name, number in OTHERS.items()}
    assert found == {name: [first[name]] * 3 for name in OTHERS}


@pytest.mark.sweep
@pytest.mark.parametrize("style", ["gpipe", "1f1b", "eager_1f1b", "interleaved", "zbv"])
def test_stages_add_nothing_to_layers(style: str) -> None:
    """Beside the sum over microbatches, which a loop with accumulation has as well. Weight gradients that a schedule
    postpones come from the same products.
    """
    chunks = 2 if style in ("interleaved", "zbv") else 1
    options = {"pp_size": 2, "num_microbatches": 2, "pp_style": style, "num_model_chunks": chunks}
    for found, _ in run_ranks(differences, 2, [(options, True)], timeout=120):
        assert found == [{}]
