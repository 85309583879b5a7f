"""Times of operators on this machine, for `calibration`: what a layer computes, at several widths and lengths.

On a CPU by the clock of the processor, so that what else the machine does counts little; on a GPU by events, many calls
in a row.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..pipeline.checkpointing import PipelineGradientCheckpointConfig
from .calibration import Point
from .measure_turns import Turns, step_of, typical
from .operators import Operators, attention_flops, bytes_of

Say = Callable[[str], None]
_WARM = 3  # passes of a model that do not count
_WEIGHTS, _WEIGHTS_BYTES = 56, 2**26  # of a model of eight layers, as far as they are no more than this
_KEPT, _MOST_KEPT = 2**26, 4096  # bytes of results, as a backward needs them: the next call writes to other memory
_LEAST = 0.25  # of what a call takes, where the host's part is measured to be longer than it
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16, torch.float32)}


@dataclass(frozen=True)
class Size:
    """What is measured.

    widths, tokens   of products
    heads            (heads, width of one, tokens) of attention
    moved            elements of tensors of elementwise operators, as powers of two
    steps            elements that an optimizer updates, as powers of two
    budget           seconds for one figure
    """

    widths: tuple[int, ...]
    tokens: tuple[int, ...]
    heads: tuple[tuple[int, int, int], ...]
    moved: tuple[int, ...]
    steps: tuple[int, ...]
    budget: float

    def shorter(self) -> Size:
        """Fewer and shorter measurements."""
        return Size(
            self.widths[:-1], self.tokens[:-1], self.heads[:-1], self.moved[::2], self.steps[:-1], self.budget / 5
        )


SIZES = {
    "cpu": Size(
        (64, 128, 256, 512, 1024),
        (16, 64, 256, 1024),
        ((4, 16, 64), (4, 32, 128), (8, 64, 256), (8, 64, 1024)),
        tuple(range(8, 24, 2)),
        (10, 14, 18, 22),
        0.1,
    ),
    "cuda": Size(
        (1024, 2048, 4096, 8192),
        (512, 2048, 8192, 16384),
        ((16, 64, 1024), (32, 128, 2048), (32, 128, 4096), (32, 128, 8192)),
        tuple(range(12, 28, 2)),
        (14, 20, 24, 27),
        0.05,
    ),
}


class Clock:
    """Seconds of calls on one kind of device."""

    def __init__(self, device: torch.device, budget: float) -> None:
        self._device, self._budget = device, budget
        self.words = "events of the device" if device.type == "cuda" else "processor time of one thread"

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one: the median of several groups of calls, behind some that do not count."""
        call()
        kept: deque[object] = deque(maxlen=max(1, min(_KEPT // max(bytes_of(call()), 1), _MOST_KEPT)))
        once = max(self._group(call, 1, kept), 1e-7)
        groups = 5
        calls = max(1, min(int(self._budget / groups / once), 10000))
        return max(median(self._group(call, calls, kept) for _ in range(groups)), 1e-9)

    def _group(self, call: Callable[[], object], calls: int, kept: deque[object]) -> float:
        if self._device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(calls):
                call()
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end) / 1000 / calls
        began = time.process_time()
        for _ in range(calls):
            kept.append(call())
        return (time.process_time() - began) / calls


def operators(device: torch.device, size: Size, say: Say) -> dict[str, Any]:
    """The tables of a `Calibration` that one rank can measure."""
    clock = Clock(device, size.budget)
    small = torch.ones(8, device=device)
    call = clock.seconds(lambda: small + small)
    # a kernel's time on a GPU is its own; on a CPU the host's part is told apart, since it is counted by itself
    host = call if device.type == "cpu" else 0.0

    def points(found: Iterator[tuple[int, int, Callable[[], object]]]) -> list[Point]:
        every = []
        for flops, moved, run in found:
            seconds = clock.seconds(run)
            every.append(Point(1, flops, moved, max(seconds - host, _LEAST * seconds)))
        return every

    tables: dict[str, Any] = {"products": {}, "attention": {}}
    with torch.no_grad():
        for dtype in _DTYPES[device.type]:
            name = str(dtype).removeprefix("torch.")
            say(f"products in {name}")
            tables["products"][name] = points(_products(device, dtype, size))
    for dtype in _DTYPES[device.type]:
        name = str(dtype).removeprefix("torch.")
        say(f"attention in {name}")
        tables["attention"][name] = points(_attention(device, dtype, size))
    say("elementwise operators, norms, copies")
    with torch.no_grad():
        tables["moving"] = points(_moving(device, size))
        tables["sums"] = points(_sums(device, size)) if device.type == "cpu" else []
    say("optimizer step")
    tables["optimizer"] = points(_steps(device, size))
    return {**tables, "call": call, "clock": clock.words}


def _products(device: torch.device, dtype: torch.dtype, size: Size) -> Iterator[tuple[int, int, Callable[[], object]]]:
    """Of a layer: between its width and as wide, and four times as wide; forward, and both gradients."""
    for width in size.widths:
        for tokens in size.tokens:
            for wide in (width, 4 * width):
                x = torch.randn(tokens, width, device=device, dtype=dtype)
                weight = torch.randn(wide, width, device=device, dtype=dtype)
                y = torch.randn(tokens, wide, device=device, dtype=dtype)
                moved = (x.numel() + weight.numel() + y.numel()) * x.element_size()
                flops = 2 * tokens * width * wide
                weights = _in_turn(weight)
                yield flops, moved, partial(_times_transposed, x, weights)
                yield flops, moved, partial(_times, y, weights)
                yield flops, moved, partial(_transposed_times, y, x)


def _in_turn(one: torch.Tensor) -> Iterator[torch.Tensor]:
    """As many as a model has, one after the other, so that a processor finds each where it would find a model's: in its
    caches or in memory.
    """
    if one.device.type != "cpu":
        return repeat(one)
    count = min(max(_WEIGHTS_BYTES // (one.numel() * one.element_size()), 2), _WEIGHTS)
    return cycle([one.clone() for _ in range(count)])


def _times_transposed(x: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
    return x @ next(weights).t()


def _times(y: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
    return y @ next(weights)


def _transposed_times(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y.t() @ x


def _attention(device: torch.device, dtype: torch.dtype, size: Size) -> Iterator[tuple[int, int, Callable[[], object]]]:
    for heads, width, tokens in size.heads:
        q, k, v = (
            torch.randn(1, heads, tokens, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        moved = q.numel() * q.element_size()

        forward = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        yield attention_flops(q, k, False, True), 4 * moved, forward
        out = forward()
        gradient = torch.randn_like(out)
        yield (
            attention_flops(q, k, True, True),
            8 * moved,
            partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True),
        )


def _moving(device: torch.device, size: Size) -> Iterator[tuple[int, int, Callable[[], object]]]:
    for power in size.moved:
        x, y = (torch.randn(2**power // 64, 64, device=device) for _ in range(2))
        half, one = x.bfloat16(), x.numel() * 4
        yield 0, 3 * one, partial(torch.mul, x, y)
        yield 0, 3 * one, partial(torch.add, x, y)
        yield 0, 2 * one, partial(F.silu, x)
        yield 0, 2 * one, x.clone
        yield 0, one + one // 2, half.float
        yield 0, one, partial(torch.mean, x, -1)


def _sums(device: torch.device, size: Size) -> Iterator[tuple[int, int, Callable[[], object]]]:
    """Adding the gradient of a weight, which has just been computed, to its sum; `moved` are bytes of that."""
    for width in size.widths:
        for wide in (width, 4 * width):
            gradient = torch.ones(wide, width, device=device)
            yield 0, 4 * gradient.numel(), partial(_add, _in_turn(torch.zeros_like(gradient)), gradient)


def _add(sums: Iterator[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    return next(sums).add_(gradient)


def _steps(device: torch.device, size: Size) -> Iterator[tuple[int, int, Callable[[], object]]]:
    for power in size.steps:
        weight = nn.Parameter(torch.zeros(2**power, device=device))
        weight.grad = torch.ones_like(weight)
        yield 0, 2**power, torch.optim.AdamW([weight], fused=True).step


def host(
    model: Callable[[int], nn.Module],
    batch: Callable[[int], Mapping[str, Any]],
    device: torch.device,
    size: Size,
) -> dict[str, float]:
    """Seconds of the host where there is hardly anything to compute: for an operator, forward and backward, as models
    of one and of four layers differ, and for a layer in all; around a microbatch and for a step, as steps of one and of
    four microbatches do; for a layer that is recomputed, beside its forward or half of it. This process must be the
    only rank of a job.

    model, batch   with so many layers, and of so many samples
    """
    few, many = (_Loop(model(layers).to(device), batch(1)) for layers in (1, 4))
    rounds = rounds_of(size)
    times = np.array([[loop.seconds() for loop in (few, many)] for _ in range(_WARM + rounds)])[_WARM:]
    layer = [typical(times[:, 1, place] - times[:, 0, place]) / 3 for place in (0, 1)]
    steps = {
        "one": step_of(model(1).to(device), batch(1), num_microbatches=1),
        "four": step_of(model(1).to(device), batch(4), num_microbatches=4),
    }
    for name, config in (
        ("plain", None),
        ("whole", PipelineGradientCheckpointConfig(gradient_checkpointing_ratio=1.0)),
        ("in part", PipelineGradientCheckpointConfig(selective_ratio=1.0)),
    ):
        steps[name] = step_of(model(4).to(device), batch(1), num_microbatches=1, gradient_checkpoint_config=config)
    taken = Turns(steps, rounds).processor
    microbatch = (taken["four"] - taken["one"]) / 3
    found = {
        "around": max(typical(microbatch) - sum(layer), 0.0),
        "step": typical(taken["one"] - microbatch),
        "layer": sum(layer),
        "again": max(typical(taken["whole"] - taken["plain"]) / 4 - layer[0], 0.0),
        "again in part": max(typical(taken["in part"] - taken["plain"]) / 4 - layer[0] / 2, 0.0),
    }
    for place, name in enumerate(("forward", "backward")):
        found[name] = 3 * layer[place] / max(many.operators[place] - few.operators[place], 1)
    return found


def rounds_of(size: Size) -> int:
    return max(9, round(200 * size.budget))


class _Loop:
    """A forward and a backward without the Booster. operators: of both"""

    def __init__(self, model: nn.Module, batch: Mapping[str, Any]) -> None:
        self._model, self._batch = model, batch
        counted = Operators()
        with counted:
            counted.part = "forward"
            loss = model(**batch).loss
            counted.part = "backward"
            loss.backward()
            counted.part = ""
        self.operators = [sum(counted.calls[name].values()) for name in ("forward", "backward")]

    def seconds(self) -> tuple[float, float]:
        """Of both, of the processor."""
        marks = [time.process_time()]
        loss = self._model(**self._batch).loss
        marks.append(time.process_time())
        loss.backward()
        marks.append(time.process_time())
        self._model.zero_grad()
        return marks[1] - marks[0], marks[2] - marks[1]
