"""Bytes that the layout report says data-parallel ranks send are those that a recorder counts in a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.booster import Booster
from shardwright.cluster.launch import launch
from shardwright.models.example_inputs import loss_of
from shardwright.pipeline.checkpointing import PipelineGradientCheckpointConfig
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.testing.calls import Call, CallWatch

NAME = "llama-causal-lm"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SAMPLES, LENGTH = 8, 16
_OWN = ("zero/collectives.py", "comm/collectives.py")  # others tell of counts and agree on names


class Sent(CallWatch):
    """Bytes that this rank sends to those of a group, by the ring formulas where a collective stands for messages."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__()
        self.by_kind = Counter[str]()
        self._ranks = tuple(ranks)

    def called(self, call: Call, reads: list[Tensor], writes: list[Tensor]) -> None:
        if call.ranks != self._ranks or not call.place.startswith(_OWN):
            return
        size = sum(tensor.nbytes for tensor in reads)
        if call.kind == "allreduce":
            self.by_kind["all-reduce"] += 2 * (len(call.ranks) - 1) * size // len(call.ranks)
        elif call.kind == "send":  # gloo's reduce-scatters and all-gathers
            self.by_kind["weights" if call.dtypes == ("bfloat16",) else "gradients"] += size


def made(case: dict[str, Any]) -> tuple[HybridParallelPlugin, Any, torch.optim.Optimizer]:
    options = dict(case)
    recomputed, tied, frozen = (options.pop(name, 0) for name in ("recomputed", "tied", "frozen"))
    config = PipelineGradientCheckpointConfig(recomputed) if recomputed else None
    size = {} if options["zero_stage"] in (0, 3) else {"zero_bucket_size_in_m": 0.03}
    plugin = HybridParallelPlugin(precision="bf16", gradient_checkpoint_config=config, **size, **options)
    model = zoo.build(NAME, dtype=torch.float32, tie_word_embeddings=bool(tied), **SIZES)
    if frozen:
        for name, param in model.named_parameters():
            param.requires_grad_("self_attn" in name)
    return plugin, model, torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)


def counted(rank: int, world: int, cases: list[dict[str, Any]]) -> list[tuple[int, dict[str, int]]]:
    found = []
    for case in cases:
        plugin, bare, bare_optimizer = made(case)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(bare, bare_optimizer)
        batch = zoo.inputs(NAME, batch_size=SAMPLES, seq_len=LENGTH, dtype=torch.float32, **SIZES)
        batch = {key: value.roll(plugin.mesh.coordinate("dp"), 0) for key, value in batch.items()}
        sent = Sent(plugin.mesh.ranks("dp"))
        with sent:
            for _ in range(3):  # the first step learns in which order units are used
                sent.by_kind.clear()
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: loss_of(outputs), optimizer)
                optimizer.step()
                optimizer.zero_grad()
        found.append((plugin.mesh.coordinate("pp"), dict(sent.by_kind)))
    return found


def predicted(case: dict[str, Any], world: int) -> dict[str, int]:
    launch(0, world, None, None, backend="fake")
    try:
        plugin, model, optimizer = made(case)
        layout = plugin.preflight(model, optimizer, SAMPLES, LENGTH)
    finally:
        dist.destroy_process_group()
    kinds = {"gradients, reduce-scatter": "gradients", "gradients, all-reduce": "all-reduce"}
    found = {}
    for traffic in layout.traffic:
        if traffic.axis == "dp":
            assert traffic.sent is not None
            found[kinds.get(traffic.what, "weights")] = traffic.sent
    return found


def compare(cases: list[dict[str, Any]], world: int) -> None:
    by_rank = run_ranks(counted, world, cases, timeout=240)
    for number, case in enumerate(cases):
        most: dict[str, int] = max((rank[number][1] for rank in by_rank), key=lambda kinds: sum(kinds.values()))
        assert predicted(case, world) == most, case


STAGES = [{"zero_stage": stage, "num_microbatches": 4} for stage in (0, 1, 2, 3)]
ALONE = [
    *STAGES,
    {"zero_stage": 2, "num_microbatches": 1},
    {"zero_stage": 3, "num_microbatches": 2, "recomputed": 1.0},
    {"zero_stage": 3, "num_microbatches": 2, "tied": True},
    {"zero_stage": 3, "num_microbatches": 2, "frozen": True},
]
PIPED = [{**case, "pp_size": 2} for case in STAGES] + [
    {"zero_stage": 3, "num_microbatches": 4, "pp_size": 2, "recomputed": 1.0},
    {"zero_stage": 2, "num_microbatches": 4, "pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2},
    {"zero_stage": 3, "num_microbatches": 4, "pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 4},
]


def test_of_accumulated_microbatches() -> None:
    compare(ALONE, world=2)


def test_of_pipelines() -> None:
    compare(PIPED[2:4] + PIPED[5:], world=4)


@pytest.mark.sweep
def test_of_all_pipelines() -> None:
    compare(PIPED, world=4)
