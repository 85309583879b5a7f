"""Models whose layers alone have parts of sequences, in pipelines and with Ulysses inside of a ring, against one
process: encoder-decoders, a router loss, BLOOM, convolutions; microbatches that differ in length.
"""

from __future__ import annotations

from typing import Any

import pytest
from layer_pipeline_ranks import SIZES, compare_all, count_messages

from shardwright.shardformer import PipelineGradientCheckpointConfig
from shardwright.testing import run_ranks

ULYSSES: dict[str, Any] = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all", "sp_size": 2}
RING = {**ULYSSES, "sequence_parallelism_mode": "ring_attn"}
BOTH = {**RING, "sp_size": 4, "ulysses_size": 2}
ALL = PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
ZBV = {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2}
BY_HAND = {"num_layers_per_stage": [0, 1, 1, 0]}  # one stage of embeddings, one of the head
CASES = [
    ("mixtral", {**RING, **ZBV, **BY_HAND, "zero_stage": 3}),
    ("bart", {**RING, "pp_size": 2, "pp_style": "zb", "zero_stage": 1, "gradient_checkpoint_config": ALL}),
    ("bloom", {"pp_size": 2, "enable_flash_attention": True}),
    ("t5 of three heads", {**ULYSSES, "sp_size": 4}),  # a rank has none, of a source that is longer than the target
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {"zero_stage": 1},
    "eager_1f1b": {"gradient_checkpoint_config": ALL},
    "interleaved": {"num_model_chunks": 2, "zero_stage": 2},
    "zb": {"zero_stage": 3, "gradient_checkpoint_config": ALL},
    "zbv": {"num_model_chunks": 2, "gradient_checkpoint_config": ALL, "zero_stage": 2},
    "dualpipev": {"num_model_chunks": 2},
    "auto": {"offload_activations": 0.5},
}
NAMES = ("t5", "bart", "mixtral", "bloom", "lfm2", "dynamic", "adapted t5", "lazy bart")
SHORT = ("mixtral", "lfm2", "dynamic")  # of two layers


def every_schedule(name: str, mode: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for style, more in SCHEDULES.items():
        arguments = {**mode, "pp_size": 2, "pp_style": style, **more}
        if "num_model_chunks" in more and name in SHORT:
            if style == "interleaved":
                continue
            arguments |= BY_HAND
        found.append((name, arguments))
    return found


LARGER = [
    (name, {**mode, "pp_size": 2, **more})
    for name in ("t5", "bart", "mixtral", "bloom")
    for mode, more in (
        (BOTH, {"zero_stage": 1}),
        ({**BOTH, "inner_ring_size": 2}, {"pp_style": "zb"}),
        ({**BOTH, "ulysses_size": 4}, {"gradient_checkpoint_config": ALL}),
        ({**ULYSSES, "tp_size": 2}, {"zero_stage": 3}),
        ({**RING, "tp_size": 2}, {"zero_stage": 2, "pp_style": "zb"}),
        (RING, {"zero_stage": 3}),  # two replicas
    )
]


def default(rank: int, world: int) -> tuple[list[int], list[int]]:
    compare_all(rank, world, CASES)
    return count_messages(rank, world, "bart", {**ULYSSES, "pp_size": 2})


def test_against_one_process() -> None:
    """And parts travel, between encoder and decoder too, where hidden states are whole on both sides; nobody tells
    shapes twice.
    """
    for rank, (headers, sent) in enumerate(run_ranks(default, 4, timeout=120)):
        assert headers[1:] == [0, 0]
        for (samples, length), numbers in zip(SIZES[1:], sent[1:], strict=True):
            assert numbers == samples * (length + length % 2) // 2 * 64, (rank, sent)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", [ULYSSES, RING], ids=["all_to_all", "ring_attn"])
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule(name: str, mode: dict[str, Any]) -> None:
    run_ranks(compare_all, 4, every_schedule(name, mode), timeout=400)


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["t5", "bart", "mixtral", "bloom"])
def test_larger_layouts(name: str) -> None:
    run_ranks(compare_all, 8, [case for case in LARGER if case[0] == name], timeout=400)


@pytest.mark.sweep
def test_ulysses_inside_of_a_ring() -> None:
    run_ranks(compare_all, 4, [(name, BOTH) for name in NAMES], timeout=400)
