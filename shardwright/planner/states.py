"""What an optimizer keeps, and what a step of it moves and computes."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..optim.kind import choose_fused
from ..optim.trial import kept_bytes, states_of_small, tried
from .fakes import Fakes
from .operators import Operators

_MOST_SHAPES = 24  # that are tried; those with most elements


class StepCost(NamedTuple):
    """Per element that a rank steps.

    moved  bytes; 0: what one pass over gradient, weight and states moves
    flops  of products
    """

    moved: float = 0.0
    flops: float = 0.0


NO_STEP = StepCost()


def optimizer_costs(optimizer: Optimizer) -> tuple[float, StepCost]:
    """Numbers of four bytes that it keeps per element of its parameters, and what a step costs."""
    kept = moved = flops = elements = 0.0
    fused = choose_fused(tried(optimizer), torch.device("cpu"))
    for group in optimizer.param_groups:
        counts = Counter(tuple(param.shape) for param in group["params"])
        shapes = sorted(counts, key=lambda shape: -counts[shape] * _numel(shape))[:_MOST_SHAPES]
        for shape in shapes:
            size = counts[shape] * _numel(shape)
            states, step = _of_shape(optimizer, group, shape)
            kept += size * states
            moved += size * step.moved
            flops += size * step.flops
            elements += size
    if not elements:
        return 0.0, NO_STEP
    return kept / elements, StepCost(0.0 if fused else moved / elements, flops / elements)


def _of_shape(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> tuple[float, StepCost]:
    """Of a parameter of this shape, by a step without memory; where that cannot be, as `states_of_small` says."""
    operators = Operators()
    try:
        with Fakes(), operators, torch.no_grad():
            param = nn.Parameter(torch.empty(shape))
            param.grad = torch.empty(shape)
            trial = tried(optimizer, group, [param])
            trial.step()  # makes the states, too
            operators.part = "step"
            trial.step()
            kept = kept_bytes(trial.state[param])
    except Exception:  # the optimizer's own code: kernels of its own, reads of numbers that are not there
        return states_of_small(optimizer, group), NO_STEP
    calls = operators.calls.get("step", Counter())
    size = _numel(shape)
    bytes_moved = sum(call.moved * number for call, number in calls.items() if call.kind == "other") / size
    return kept / (4 * size), StepCost(bytes_moved, sum(call.flops * number for call, number in calls.items()) / size)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
