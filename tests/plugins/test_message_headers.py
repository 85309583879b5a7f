"""Descriptions of messages travel in the first step; from then on both ends know the shapes of new lengths by
themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from test_regrouped_batches import images
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from tests.models import tiny_qwen2_vl

STEPS = ((5, 13), (6, 9), (5, 21), (3, 30), (4, 10))  # samples and length of a step in two microbatches


def text(name: str, **config: Any) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    model = zoo.build(name, dtype=torch.float32, **config)
    return model, [
        zoo.inputs(name, batch_size=samples, seq_len=length, seed=step) for step, (samples, length) in enumerate(STEPS)
    ]


def cases() -> dict[str, tuple[nn.Module, list[dict[str, torch.Tensor]]]]:
    routed = {"output_router_logits": True, "router_aux_loss_coef": 0.1, "experts_implementation": "eager"}
    steps = [images(step, samples=4, length=length) for step, length in enumerate((24, 27, 30, 25))]
    with_images = [
        {key: value.float() if value.is_floating_point() else value for key, value in batch.items()} for batch in steps
    ]
    return {
        "llama": text("llama-causal-lm"),
        "gpt2": text("gpt2-causal-lm"),
        "bert": text("bert-masked-lm"),
        "t5": text("t5-conditional-generation"),
        "mixtral": text("mixtral-causal-lm", **routed),
        "qwen2-vl": (tiny_qwen2_vl.build(num_hidden_layers=4), with_images),
    }


def _count(rank: int, world: int, names: list[str]) -> dict[str, list[int]]:
    """Headers that this rank has received in each step, by model."""
    found = {}
    made = cases()
    for name in names:
        model, batches = made[name]
        example = batches[0] if name == "qwen2-vl" else None
        plugin = HybridParallelPlugin(pp_size=world, num_microbatches=2, precision="fp32", example_inputs=example)
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
        comm, counts = model.executor.comm, []
        receive = comm._receive_header

        def counting(*args: Any, receive: Any = receive, counts: list[int] = counts) -> Any:
            counts[-1] += 1
            return receive(*args)

        comm._receive_header = counting
        for batch in batches:
            counts.append(0)
            booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
            optimizer.zero_grad()
        found[name] = counts
    return found


def test_no_headers_from_the_second_step_on() -> None:
    names = list(cases())
    results = run_ranks(_count, 2, names, timeout=120)
    assert results[0] == {name: [0] * len(counts) for name, counts in results[1].items()}, "a first stage receives none"
    for name, counts in results[1].items():
        assert counts[0] == 1, (name, counts, "also not for a last microbatch of another size")
        assert not any(counts[1:]), (name, counts)
