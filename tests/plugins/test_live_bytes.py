"""Bytes that the layout report states are those of the memory that is there, counted by what torch's operators are
given and return.
"""

from __future__ import annotations

import gc

import pytest
import torch

from shardwright.booster import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.testing.live_bytes import LiveBytes

NAME = "llama-causal-lm"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
LAYER = 4 * 64 * 64 + 3 * 64 * 256 + 2 * 64  # elements
MATRIX = 64 * 256  # the largest of them, a bucket of its own
BUCKET = 0.01  # million elements
# bytes that make it worth while to look whether there have never been more; a weight has more, an activation less
LOOKED_AT = 8192
LAYOUTS = [("fp32", 0), ("fp32", 1), ("fp32", 2), ("fp32", 3), ("bf16", 3)]


def activations(dtype: torch.dtype, batch: dict[str, torch.Tensor]) -> int:
    """What a step of plain torch takes beside weights, gradients and states."""
    with LiveBytes(LOOKED_AT) as live:
        model = zoo.build(NAME, dtype=dtype, **SIZES)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step() -> None:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        kept, most = live.of_steps(step)
    return most - kept


def measure(rank: int, world: int) -> None:
    ids = torch.tensor([[3, 5], [7, 11]]) + rank
    batch = {"input_ids": ids, "labels": ids}
    besides = {dtype: activations(dtype, batch) for dtype in (torch.float32, torch.bfloat16)}
    for precision, stage in LAYOUTS:
        working = torch.float32 if precision == "fp32" else torch.bfloat16
        plugin = HybridParallelPlugin(
            zero_stage=stage, precision=precision, zero_bucket_size_in_m=BUCKET, gather_ahead=1
        )
        booster = Booster(plugin=plugin)
        with LiveBytes(LOOKED_AT) as live:
            plain = zoo.build(NAME, dtype=torch.float32, **SIZES)
            model, optimizer, *_ = booster.boost(plain, torch.optim.AdamW(plain.parameters(), fused=True))
            del plain
            gc.collect()
            at_boost = live.bytes()

            def step() -> None:
                booster.backward(model(**batch).loss, optimizer)  # noqa: B023, runs here
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

            kept, most = live.of_steps(step)
        [shape] = plugin.layout.ranks
        # Two buckets are on their way. On the CPU what arrives of each has room of its own; so have gradients that are
        # kept as shards.
        piece = {0: 0, 1: MATRIX, 2: MATRIX, 3: LAYER / 4}[stage] * 4
        scratch = {0: 0, 1: 2, 2: 4, 3: 4}[stage] * piece
        # Whole gradients of a bucket; of stage 3 those of a layer, which is gathered, as is the next.
        within = {0: 0, 1: 0, 2: MATRIX * 4, 3: 3 * LAYER * working.itemsize}[stage]
        what = f"{precision} stage {stage}"
        assert at_boost == pytest.approx(shape.total - shape.states, rel=0.001), what
        assert kept == pytest.approx(shape.total + scratch, rel=0.005), what
        assert most == pytest.approx(shape.total + scratch + within + besides[working], rel=0.03), what


def test_live_bytes_are_those_of_the_report() -> None:
    run_ranks(measure, 2, timeout=120)
