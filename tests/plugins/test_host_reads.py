"""Nothing in a step waits for the device: what a model asks of its masks the host answers, which had the batch."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.testing.device_reads import DeviceReads

# Where the CPU goes another way than a device, whose losses travel to the host while the next step is computed.
ON_CPU_ALONE = ("loss_guard.py",)
LLAMA, MOE, T5, BERT = "llama-causal-lm", "qwen3-moe-causal-lm", "t5-conditional-generation", "bert-masked-lm"
RING = {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"}
TRADED = RING | {"sequence_parallelism_mode": "all_to_all"}
SPLIT = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
FP16 = {"precision": "fp16", "max_norm": 1.0}
PIPELINE = {"pp_size": 2, "num_microbatches": 3}
TWO_CHUNKS = PIPELINE | {"num_model_chunks": 2}

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    (LLAMA, {"zero_stage": 2, **FP16}),
    (LLAMA, {"zero_stage": 3, **FP16}),
    (BERT, {"tp_size": 2}),
    (LLAMA, RING),
    (LLAMA, TWO_CHUNKS | {"pp_style": "interleaved"}),
    (T5, PIPELINE | {"pp_style": "1f1b", "zero_stage": 1, "max_norm": 1.0}),
    (MOE, {"num_microbatches": 2}),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    (LLAMA, {}),
    (LLAMA, {"zero_stage": 1, "overlap_allgather": True, "max_norm": 1.0}),
    (LLAMA, {"num_microbatches": 2, "zero_stage": 2, **FP16}),
    (LLAMA, SPLIT),
    (LLAMA, SPLIT | {"sequence_parallelism_mode": "ring"}),
    (LLAMA, TRADED),
    (LLAMA, RING | {"num_microbatches": 2}),
    *((LLAMA, PIPELINE | {"pp_style": style}) for style in ("gpipe", "1f1b", "eager_1f1b", "zb")),
    *((LLAMA, TWO_CHUNKS | FP16 | {"pp_style": style}) for style in ("interleaved", "zbv", "dualpipev")),
    (T5, {"num_microbatches": 2}),
    (T5, PIPELINE),
    (BERT, PIPELINE),
    (LLAMA, {"attention_backend": "sdpa"}),
    (LLAMA, {"attention_backend": "eager"}),
    ("lora", {"zero_stage": 1, "max_norm": 1.0}),
    ("lora", PIPELINE),
    ("lora", {"zero_stage": 3, **FP16}),
    (LLAMA, TWO_CHUNKS | {"pp_style": "interleaved", "precision": "bf16", "max_norm": 1.0, "zero_stage": 2}),
    (LLAMA, PIPELINE | FP16 | {"zero_stage": 1}),
    (LLAMA, TRADED | FP16 | {"zero_stage": 3}),
    (LLAMA, SPLIT | FP16 | {"zero_stage": 1, "num_microbatches": 2}),
    (MOE, PIPELINE),
    (MOE, {"tp_size": 2}),
]


def reads(name: str, options: dict[str, Any]) -> list[str]:
    """Places that read what is on the device, in one step whose microbatches are all padded otherwise than ever before,
    one that has no padding, and one without a mask.
    """
    plugin = HybridParallelPlugin(**{"precision": "fp32", **options})
    zoo_name = LLAMA if name == "lora" else name
    model: Any = zoo.build(zoo_name, dtype=torch.float32)
    if name == MOE:  # by default it loops over the experts that it finds, whose tokens it looks for
        model.set_experts_implementation("grouped_mm")
    with DeviceReads([*model.parameters(), *model.buffers()]) as seen:
        booster = Booster(plugin=plugin)
        if name == "lora":
            model = booster.enable_lora(model, lora_config=peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
        trained = [param for param in model.parameters() if param.requires_grad]
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(trained, lr=1e-3))

        def step(number: int, padding: str) -> None:
            batch = zoo.inputs(zoo_name, batch_size=6, seq_len=12, seed=number + 10 * plugin.data_parallel[1])
            for key in [key for key in batch if key.endswith("attention_mask")]:
                if padding == "none":
                    del batch[key]
                elif padding == "ones":
                    batch[key] = torch.ones_like(batch[key])
            if "num_microbatches" in options:
                booster.execute_pipeline(iter([batch]), model, lambda outputs, _: outputs.loss, optimizer)
            else:
                booster.backward(model(**batch).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()

        paddings = ("some", "ones", "none")
        for number in range(6):
            step(number, paddings[number % 3])
        assert not seen.places, "nothing is counted yet"
        with seen.counting():
            for number, padding in enumerate(paddings):
                step(6 + number, padding)
    return [f"{place} x {times}" for place, times in seen.places.items() if not place.startswith(ON_CPU_ALONE)]


def reads_of(rank: int, world: int, layouts: list[tuple[str, dict[str, Any]]]) -> dict[str, list[str]]:
    found = {f"{name} {options}": reads(name, options) for name, options in layouts}
    return {layout: places for layout, places in found.items() if places}


def test_no_step_reads_the_device() -> None:
    assert run_ranks(reads_of, 2, LAYOUTS, timeout=240) == [{}, {}]


@pytest.mark.sweep
def test_no_step_of_any_layout_reads_the_device() -> None:
    assert run_ranks(reads_of, 2, MORE, timeout=900) == [{}, {}]


def test_reads_are_seen() -> None:
    """The instrument itself: every kind of operation for which a host waits."""
    weight = torch.nn.Parameter(torch.arange(1.0, 7.0))
    kinds = [
        lambda x: x.sum().item(),
        lambda x: bool((x > 2).all()),
        lambda x: 3.0 in x,
        lambda x: x.nonzero(),
        lambda x: x[x > 2],
        lambda x: x.clone().index_put_((x > 2,), x[:4] * 0),
        lambda x: x.masked_select(x > 2),
        lambda x: torch.equal(x, x + 1),
        lambda x: x.unique(),
        lambda x: x.repeat_interleave(x.long()),
        lambda x: x.detach().tolist(),
        lambda x: x.detach().numpy(),
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.where(x > 2),
    ]
    for number, kind in enumerate(kinds):
        with DeviceReads([weight]) as seen:
            moved = torch.zeros(6)
            moved[:] = weight.detach() * 1  # what is written with what is on the device is there, too
            with seen.counting():
                kind(moved)
        assert sum(seen.places.values()) == 1, (number, seen.places)
    with DeviceReads([weight]) as seen, seen.counting():
        host = torch.arange(6.0)
        assert 3.0 in host[host > 2]
        assert torch.equal(host, host.cpu())
        (weight * 2)[weight > 2] = 0.0  # a number: torch fills without looking
        weight.to(host.device)
    assert not seen.places
