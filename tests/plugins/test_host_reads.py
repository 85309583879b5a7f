"""Nothing in a step waits for the device: what a model asks of its masks the host answers, which had the batch."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from habits import OPTIMIZERS, Habits, criterion_of, prepare

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks, zoo
from shardwright.testing.device_reads import DeviceReads

# Where the CPU goes another way than a device, whose losses travel to the host while the next step is computed.
ON_CPU_ALONE = ("loss_guard.py",)
LLAMA, MOE, T5, BERT = "llama-causal-lm", "qwen3-moe-causal-lm", "t5-conditional-generation", "bert-masked-lm"
BLOOM = "bloom-causal-lm"
ROUTES = "expert_exchange.py tolist"
LORA = Habits(lora=True)
RING = {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"}
TRADED = RING | {"sequence_parallelism_mode": "all_to_all"}
SPLIT = {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"}
FP16 = {"precision": "fp16", "max_norm": 1.0}
PIPELINE = {"pp_size": 2, "num_microbatches": 3}
TWO_CHUNKS = PIPELINE | {"num_model_chunks": 2}


@dataclass(frozen=True)
class Job:
    """How a model is trained.

    habits      of `habits.Habits`: lora, criterion, frozen, optimizer, ...
    calls       the model is called, whatever `num_microbatches` says
    packed      rows hold documents one after the other, whose positions begin again, and no mask
    accumulate  backwards of a step
    unavoidable  reads of three steps, by file and operator
    """

    model: str
    options: dict[str, Any]
    habits: Habits = field(default_factory=Habits)
    packed: bool = False
    checkpointing: bool = False
    accumulate: int = 1
    unavoidable: dict[str, int] = field(default_factory=dict)


LAYOUTS: list[Job] = [
    Job(LLAMA, {"zero_stage": 3, **FP16}),
    Job(LLAMA, RING),
    Job(T5, PIPELINE | {"pp_style": "1f1b", "zero_stage": 1, "max_norm": 1.0}),
    # once per layer and forward, that of the backward included: how many rows come from whom
    Job(MOE, {"ep_size": 2, "zero_stage": 1}, checkpointing=True, unavoidable={ROUTES: 3 * 4 * 2}),
]
MORE: list[Job] = [
    Job(LLAMA, {"zero_stage": 2, **FP16}),
    Job(BERT, {"tp_size": 2}),
    Job(LLAMA, TWO_CHUNKS | {"pp_style": "interleaved"}),
    Job(MOE, {"num_microbatches": 2}),
    Job(LLAMA, PIPELINE | {"zero_stage": 2}, checkpointing=True, accumulate=2),
    Job(BLOOM, RING),
    Job(LLAMA, {}),
    Job(LLAMA, {"zero_stage": 1, "overlap_allgather": True, "max_norm": 1.0}),
    Job(LLAMA, {"num_microbatches": 2, "zero_stage": 2, **FP16}),
    Job(LLAMA, SPLIT),
    Job(LLAMA, SPLIT | {"sequence_parallelism_mode": "ring"}),
    Job(LLAMA, TRADED),
    Job(LLAMA, RING | {"num_microbatches": 2}),
    *(Job(LLAMA, PIPELINE | {"pp_style": style}) for style in ("gpipe", "1f1b", "eager_1f1b", "zb")),
    *(Job(LLAMA, TWO_CHUNKS | FP16 | {"pp_style": style}) for style in ("interleaved", "zbv", "dualpipev")),
    Job(T5, {"num_microbatches": 2}),
    Job(T5, PIPELINE),
    Job(BERT, PIPELINE),
    Job(LLAMA, {"attention_backend": "sdpa"}),
    Job(LLAMA, {"attention_backend": "eager"}),
    Job(LLAMA, {"zero_stage": 1, "max_norm": 1.0}, LORA),
    Job(LLAMA, PIPELINE, LORA),
    Job(LLAMA, {"zero_stage": 3, **FP16}, LORA),
    Job(LLAMA, TWO_CHUNKS | {"pp_style": "interleaved", "precision": "bf16", "max_norm": 1.0, "zero_stage": 2}),
    Job(LLAMA, PIPELINE | FP16 | {"zero_stage": 1}),
    Job(LLAMA, TRADED | FP16 | {"zero_stage": 3}),
    Job(LLAMA, SPLIT | FP16 | {"zero_stage": 1, "num_microbatches": 2}),
    Job(MOE, PIPELINE),
    Job(MOE, {"tp_size": 2}),
    Job(LLAMA, {"zero_stage": 2, "fp8_communication": True, "max_norm": 1.0}),
    Job(LLAMA, {"zero_stage": 3, "fp8_communication": True}),
    Job(LLAMA, SPLIT | {"fp8_communication": True}),
    Job(LLAMA, PIPELINE | {"fp8_communication": True}),
    Job(LLAMA, {"tp_size": 2, "num_microbatches": 2}, Habits(criterion="smoothed")),
    Job(LLAMA, PIPELINE, Habits(criterion="with_z_loss")),
    Job(LLAMA, {"num_microbatches": 2}, Habits(criterion="masked_mean")),
    Job(LLAMA, {"zero_stage": 2, **FP16}, packed=True),
    Job(LLAMA, RING, packed=True),
    Job(LLAMA, TRADED | {"num_microbatches": 2}, packed=True),
    Job(LLAMA, PIPELINE, packed=True),
    Job(LLAMA, {"zero_stage": 3, **FP16}, checkpointing=True),
    Job(LLAMA, {"zero_stage": 1, **FP16}, accumulate=3),
    Job(LLAMA, PIPELINE | {"num_sequence_slices": 2}),
    Job(LLAMA, {"zero_stage": 2, "max_norm": 1.0}, Habits(frozen=True)),
    Job(LLAMA, {"zero_stage": 1}, Habits(optimizer="sgd")),
    Job(LLAMA, {"zero_stage": 1, "max_norm": 1.0}, Habits(optimizer="groups")),
    Job(LLAMA, {"zero_stage": 2}, Habits(optimizer="rmsprop")),
    Job("gpt2-causal-lm", {"tp_size": 2, **FP16}),
    Job("gpt2-causal-lm", PIPELINE),
    Job("opt-causal-lm", {"tp_size": 2}),
    Job("opt-causal-lm", PIPELINE),
    Job(BLOOM, {"tp_size": 2}),
    Job(BLOOM, TRADED),
    Job(BLOOM, PIPELINE),
    Job("mistral-causal-lm", PIPELINE | {"pp_style": "zbv", "num_model_chunks": 2}),
    Job("mistral-causal-lm", RING),
    Job("vit-image-classification", {"tp_size": 2}),
    Job("vit-image-classification", PIPELINE),
    Job("llama-sequence-classification", {"zero_stage": 1}),
    Job("llama-sequence-classification", PIPELINE),
    Job("bert-question-answering", {"num_microbatches": 2}),
    Job("bert-masked-lm", RING),
    Job(T5, {"tp_size": 2, "zero_stage": 3}),
    Job("mixtral-causal-lm", PIPELINE),
    Job("chatglm-causal-lm", {"tp_size": 2}),
    Job("chatglm-causal-lm", PIPELINE),
    Job(MOE, {"ep_size": 2, "zero_stage": 3, **FP16}, unavoidable={ROUTES: 3 * 4}),
    Job(MOE, {"ep_size": 2, "num_microbatches": 3}, unavoidable={ROUTES: 3 * 4 * 3}),
]


def reads(job: Job) -> dict[str, int]:
    """Places that read what is on the device, in one step whose microbatches are all padded otherwise than ever before,
    one that has no padding, and one without a mask.
    """
    options = {"precision": "fp32", **job.options}
    plugin = HybridParallelPlugin(**options)
    model = prepare(zoo.build(job.model, dtype=torch.float32), job.model.split("-")[0], job.habits)
    if (
        "moe" in job.model or "mixtral" in job.model
    ):  # by default it loops over the experts that it finds, whose tokens it looks for
        model.set_experts_implementation("grouped_mm")
    criterion = criterion_of(job.habits, job.accumulate)
    with DeviceReads([*model.parameters(), *model.buffers()]) as seen:
        booster, optimizer = Booster(plugin=plugin), OPTIMIZERS[job.habits.optimizer](model)
        if job.checkpointing:
            model.gradient_checkpointing_enable()
        model, optimizer, *_ = booster.boost(model, optimizer)

        def backward(batch: dict[str, torch.Tensor]) -> None:
            if "num_microbatches" in options:
                booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
            else:
                booster.backward(criterion(model(**batch), batch), optimizer)

        def step(number: int, padding: str) -> None:
            for part in range(job.accumulate):
                seed = 100 * part + number + 10 * plugin.data_parallel[1]
                batch = zoo.inputs(job.model, batch_size=6, seq_len=12, seed=seed, dtype=torch.float32)
                for key in [key for key in batch if key.endswith("attention_mask")]:
                    if padding == "none" or job.packed:
                        del batch[key]
                    elif padding == "ones":
                        batch[key] = torch.ones_like(batch[key])
                if job.packed:
                    batch["position_ids"] = (torch.arange(12) % (3 + number % 4)).expand(6, 12).contiguous()
                if job.accumulate > 1 and part < job.accumulate - 1:
                    with booster.no_sync(model, optimizer):
                        backward(batch)
                else:
                    backward(batch)
            optimizer.step()
            optimizer.zero_grad()

        paddings = ("some", "ones", "none")
        for number in range(6):
            step(number, paddings[number % 3])
        assert not seen.places, "nothing is counted yet"
        with seen.counting():
            for number, padding in enumerate(paddings):
                step(6 + number, padding)
    found = {place: times for place, times in seen.places.items() if not place.startswith(ON_CPU_ALONE)}
    return {} if by_file(found) == job.unavoidable else found


def by_file(places: dict[str, int]) -> Counter[str]:
    found = Counter[str]()
    for place, times in places.items():
        found[re.sub(r":\d+", "", place)] += times
    return found


def reads_of(rank: int, world: int, jobs: list[Job]) -> dict[str, dict[str, int]]:
    found = {}
    for job in jobs:
        try:
            found[str(job)] = reads(job)
        except Exception as error:
            error.add_note(str(job))
            raise
    return {job: places for job, places in found.items() if places}


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
        lambda x: x.to(torch.zeros(1).device),  # of the host's
        # what is sent is waited for, too
        lambda x: torch.tensor([1.0, 2.0], device=x.device),
        lambda x: torch.arange(3).to(x.device),
        lambda x: x.copy_(torch.zeros(6)),
        lambda x: x[[1, 2]],
        lambda x: x[torch.arange(2)],
        lambda x: x.__setitem__(slice(0, 2), torch.zeros(2)),
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
        there = weight.detach() * 2
        there[there > 2] = 0.0  # a number: torch fills without looking
        there[torch.arange(2, device=there.device)] = 1.0
        there.copy_(host, non_blocking=True)
        torch.zeros(3, device=there.device).sum()
        assert host.device != there.device
        host.to(host.device)
    assert not seen.places
    with DeviceReads([weight]) as seen, seen.counting():  # hooks run under no mode of torch's functions by themselves
        weight.register_hook(lambda grad: grad.tolist() and None)
        (weight * 2).sum().backward()
    assert sum(seen.places.values()) == 1, seen.places
