"""Several ranks on one device: layouts, drawn ones too, over a backend that has streams as NCCL has them.

SHARDWRIGHT_GPU_DRAWS=50         how many layouts are drawn
SHARDWRIGHT_GPU_SECONDS=60       for them; what does not fit is said
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from habits import Habits
from hybrid_ranks import Layout
from jobs import failures, trained
from layout_draws import draw as drawn
from place import DEVICE, draw, size
from torch import Tensor

from shardwright.comm.compat import all_gather_single, all_to_all_single, reduce_scatter_single
from shardwright.testing import run_ranks

pytestmark = pytest.mark.gpu
DRAWS = int(os.environ.get("SHARDWRIGHT_GPU_DRAWS", size(50, 4)))
SECONDS = float(os.environ.get("SHARDWRIGHT_GPU_SECONDS", size(60, 120)))
CLIPPED = Habits(clip="plugin", clip_at=0.05)
SPLIT = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
AXIS = {"sp_size": 2, "enable_sequence_parallelism": True}
PIPE = {"pp_size": 2, "num_microbatches": 3}
TWO = [
    Layout("llama-causal-lm", 2, {"zero_stage": 1, "overlap_allgather": True}, habits=CLIPPED, accumulate=2),
    Layout("llama-causal-lm", 2, {"zero_stage": 2, "cpu_offload": True}, habits=CLIPPED),
    Layout("llama-causal-lm", 2, {"zero_stage": 3}, habits=CLIPPED, checkpointing=True),
    Layout("llama-tied-causal-lm", 2, {"tp_size": 2}, habits=CLIPPED),
    Layout("llama-causal-lm", 2, {**SPLIT, "enable_sequence_overlap": True}),
    Layout("llama-causal-lm", 2, {**AXIS, "sequence_parallelism_mode": "ring_attn"}),
    Layout("llama-causal-lm", 2, {**AXIS, "sequence_parallelism_mode": "all_to_all"}),
    Layout(
        "llama-causal-lm", 2, {**PIPE, "zero_stage": 1, "offload_activations": 1.0}, {"num_hidden_layers": 4}, batch=6
    ),
    Layout("t5-conditional-generation", 2, {**PIPE, "pp_style": "zb"}, batch=6),
    Layout("llama-causal-lm", 2, {**PIPE, "pp_style": "zbv", "num_model_chunks": 2}, {"num_hidden_layers": 4}, batch=6),
    Layout("qwen3-moe-causal-lm", 2, {"ep_size": 2, "zero_stage": 1}),
    Layout("llama-causal-lm", 2, {"zero_stage": 2}, habits=Habits(half="fp16", clip="plugin"), dtype="fp32"),
    Layout("llama-causal-lm", 2, {"zero_stage": 1}, habits=Habits(half="bf16", wire="bf16"), dtype="fp32"),
]
FOUR = [
    Layout("llama-tied-causal-lm", 4, {"tp_size": 2, **PIPE, "zero_stage": 1}, habits=CLIPPED, batch=6),
    Layout("gpt2-causal-lm", 4, {**PIPE, "pp_style": "zb", "zero_stage": 2}, habits=CLIPPED, batch=6),
    Layout("bert-masked-lm", 4, {**PIPE, "tp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2}, batch=6),
    Layout("llama-causal-lm", 4, {"tp_size": 2, "zero_stage": 3}, habits=CLIPPED),
    Layout("llama-causal-lm", 4, {"zero_stage": 1, "zero_group_size": 2}, habits=CLIPPED),
    Layout("llama-causal-lm", 4, {**AXIS, "sequence_parallelism_mode": "ring_attn", "zero_stage": 1}),
]


def check(layouts: list[Layout], seconds: float, checked: bool = False) -> None:
    found, done = failures(layouts, seconds, "staged", checked)
    print(f"{done} of {len(layouts)} layouts run, {len(found)} failed")
    assert not found, "\n\n".join([f"{len(found)} of {done} layouts failed", *found])
    if done < len(layouts):
        pytest.skip(f"{done} of {len(layouts)} layouts agree; there was no time for the others")


@pytest.mark.timeout(560)
@pytest.mark.parametrize("layouts", [TWO, FOUR], ids=["two", "four"])
def test_layouts(layouts: list[Layout]) -> None:
    check(layouts, SECONDS if layouts is TWO else 0.7 * SECONDS)


@pytest.mark.timeout(560)
@pytest.mark.parametrize("world", [2, 4])
def test_drawn_layouts(world: int) -> None:
    check([drawn(5000 + number, (world,)) for number in range(DRAWS // 2)], SECONDS)


@pytest.mark.timeout(560)
def test_layouts_under_the_sanitizer_of_streams() -> None:
    """torch's sanitizer follows what each stream reads and writes, and what orders them."""
    check([TWO[0], TWO[2], TWO[7]], SECONDS, checked=True)


@pytest.mark.parametrize("plugin", ["ddp", "fsdp"])
def test_plugins_of_torch(plugin: str) -> None:
    """Which wait for futures and streams in ways of their own; both ranks have the same batch."""
    for mine, theirs, apart in run_ranks(trained, 2, plugin, {}, None, backend="staged", timeout=120, debug="OFF"):
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert apart <= 1e-3


def exchanged(rank: int, world: int) -> list[Tensor]:
    """Large enough that a copy is still under way when it is looked at too early; nothing waits for the device."""
    rows = size(400_000, 100)
    x = draw(world * rows, 4, dtype=torch.float32, seed=rank)
    own, part, turned = (
        torch.empty_like(x[:rows]),
        torch.empty(world * world * rows, 4, device=DEVICE),
        torch.empty_like(x),
    )
    total = x * 2
    works = [
        dist.all_reduce(total, async_op=True),
        reduce_scatter_single(own, x, async_op=True),
        all_gather_single(part, x, async_op=True),
        all_to_all_single(turned, x, async_op=True),
    ]
    for work in works:
        work.wait()
    results = [total + 1, own + 1, part + 1, turned + 1]
    x.fill_(float("nan"))  # behind the calls that read it
    peer = (rank + 1) % world
    message, taken = results[1] * 3, torch.empty_like(own)
    for work in [dist.isend(message, peer), dist.irecv(taken, (rank - 1) % world)]:
        work.wait()
    return [each.double().sum(0).cpu() for each in [*results, taken]]


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_are_ordered_by_streams(world: int) -> None:
    rows = size(400_000, 100)
    inputs = [draw(world * rows, 4, dtype=torch.float32, seed=rank).cpu() for rank in range(world)]
    total = torch.stack(inputs).sum(0)
    for rank, found in enumerate(run_ranks(exchanged, world, backend="staged", timeout=120, debug="OFF")):
        own = total[rank * rows : (rank + 1) * rows] + 1
        before = (rank - 1) % world
        expected = [
            2 * total + 1,
            own,
            torch.cat(inputs) + 1,
            torch.cat([each[rank * rows : (rank + 1) * rows] for each in inputs]) + 1,
            3 * (total[before * rows : (before + 1) * rows] + 1),
        ]
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other.double().sum(0), rtol=1e-4, atol=1e-2 * rows**0.5)
