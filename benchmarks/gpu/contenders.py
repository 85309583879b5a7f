"""Training steps that are compared: forward, backward, clipping, AdamW."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from kernels import Kernels, kernels_of
from sizes import Batch, Shape
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer import PipelineGradientCheckpointConfig

Step = Callable[[], object]
RATE = 1e-4
WITHOUT = {"enable_fused_cross_entropy": False}
# Options of ours, by what they are called in tables. The first is ours with nothing turned on. On one rank ZeRO 2 has
# no shards: what it changes is that gradients go to their buffer once, in fp32, and not by way of zeros that they are
# added to: 8 bytes per parameter in the place of 24.
LEVERS: dict[str, dict[str, Any]] = {
    "nothing": WITHOUT,
    "fused linear and cross entropy": {},
    "attention backend": {**WITHOUT, "enable_flash_attention": True},
    "norms": {**WITHOUT, "enable_fused_normalization": True},
    "gated activation": {**WITHOUT, "enable_fused_activation": True},
    "rotary": {**WITHOUT, "enable_fused_rotary": True},
    "compiled layers": {**WITHOUT, "enable_jit_fused": True},
    "gradients by bucket": {**WITHOUT, "zero_stage": 2},
    "all (enable_all_optimization)": {"enable_all_optimization": True},
    "all, by bucket": {"enable_all_optimization": True, "zero_stage": 2},
    "all, by bucket, compiled": {"enable_all_optimization": True, "zero_stage": 2, "enable_jit_fused": True},
    "all, recomputed by cost": {
        "enable_all_optimization": True,
        "gradient_checkpoint_config": PipelineGradientCheckpointConfig(selective_ratio=1.0),
    },
    "all, deterministic": {"enable_all_optimization": True},
}
BEST = "all, by bucket, compiled"
EAGER = "all, by bucket"  # where compiling takes longer than there is time


class Timing(NamedTuple):
    """seconds       of a step, median
    spread        slowest over fastest of those that are counted
    first         seconds of the first step, with everything that is compiled then
    peak          bytes that the allocator had given out at most, in a step
    loss          of the last step
    kernels       that the device was busy with, where that was asked for
    host          seconds in which the host issued a step, median; None where it computes itself
    """

    seconds: float
    spread: float
    first: float
    peak: int
    loss: float
    kernels: Kernels | None = None
    host: float | None = None


def pinned(batch: Batch, device: torch.device) -> Batch:
    """As loaders with `pin_memory=True` have batches: every step of every contender takes its own to the device."""
    return {name: value.pin_memory() for name, value in batch.items()} if device.type == "cuda" else batch


def ours(shape: Shape, config: Any, batch: Batch, device: torch.device, options: dict[str, Any]) -> Step:
    """In bf16, with masters in fp32."""
    booster = Booster(plugin=HybridParallelPlugin(precision="bf16", max_norm=1.0, **options))
    model: Any = shape.build(config, device, torch.float32)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer, *_ = booster.boost(model, optimizer)
    batch = pinned(batch, device)

    def step() -> object:
        result = booster.execute_pipeline(iter([batch]), model, lambda o, _: o.loss, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
        return result["loss"]

    return step


def theirs(
    shape: Shape, config: Any, batch: Batch, device: torch.device, masters: bool, compiled: bool, experts: str = ""
) -> Step:
    """Plain transformers. With `masters` weights are fp32 and autocast computes in bf16, as its Trainer has it; else
    weights and moments are bf16.
    """
    model: Any = shape.build(config, device, torch.float32 if masters else torch.bfloat16)
    if experts:
        model.set_experts_implementation(experts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    batch = pinned(batch, device)
    forward = torch.compile(model) if compiled else model

    def step() -> object:
        moved = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        if not masters:
            moved = {name: value.bfloat16() if value.is_floating_point() else value for name, value in moved.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=masters):
            loss = forward(**moved).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def timed(
    step: Step, device: torch.device, seconds: float, steps: int = 12, warm_up: int = 3, with_kernels: bool = False
) -> Timing:
    """Of at most `steps`, and no more than `seconds` have room for. On a GPU from the end of a step to the end of the
    next, and the host waits for none of them, as in training.
    """
    end = time.perf_counter() + seconds
    took = [waited_for(step, device) for _ in range(warm_up)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    room = max(3, min(steps, int((end - time.perf_counter()) / took[-1])))
    taken, issued, loss = (between_events if device.type == "cuda" else by_the_clock)(step, room)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    kernels = kernels_of(step) if with_kernels and device.type == "cuda" else None
    host = median(issued) if issued else None
    return Timing(median(taken), max(taken) / min(taken), took[0], peak, float(loss), kernels, host)  # type: ignore[arg-type]


def waited_for(step: Step, device: torch.device) -> float:
    begin = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - begin


def between_events(step: Step, times: int) -> tuple[list[float], list[float], object]:
    """Seconds of each step on the device, those in which the host issued it, and what the last one returned."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    issued, loss = list[float](), None
    events[0].record()
    for event in events[1:]:
        begin = time.perf_counter()
        loss = step()
        event.record()
        issued.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return [begun.elapsed_time(ended) / 1e3 for begun, ended in pairwise(events)], issued, loss


def by_the_clock(step: Step, times: int) -> tuple[list[float], list[float], object]:
    """The same of a device that the host is itself."""
    taken, loss = list[float](), None
    for _ in range(times):
        begin = time.perf_counter()
        loss = step()
        taken.append(time.perf_counter() - begin)
    return taken, [], loss


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def clear(device: torch.device) -> None:
    """Before the next contender, that nothing of the last one is left."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
