"""What a model does to its logits between head and loss, number by number: scales, soft caps, casts.

A list of steps is applied to any rows, and its derivative to their gradients:

    scale       y = x c, or x / c         dx = dy c, or dy / c
    tanh        y = tanh x                dx = dy (1 - y^2)
    cast        y = x in another dtype    dx = dy in that of x

A soft cap c is: divide by c, tanh, multiply by c. Steps compute in the dtype that the logits have, as the model would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    kind: Literal["multiply", "divide", "tanh", "cast"]
    value: float | torch.dtype | None = None


def steps_of(scale: float = 1.0, softcap: float | None = None) -> tuple[Step, ...]:
    """z -> z scale, then softcap tanh(z / softcap)."""
    steps: list[Step] = [] if scale == 1.0 else [Step("multiply", scale)]
    if softcap is not None:
        steps += [Step("divide", softcap), Step("tanh"), Step("multiply", softcap)]
    return tuple(steps)


def applied(steps: Sequence[Step], rows: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(what the steps make of `rows`, what `differentiated` needs of it)."""
    kept = []
    for kind, value in steps:
        if kind == "multiply":
            rows = rows * value  # type: ignore[operator]
        elif kind == "divide":
            rows = rows / value  # type: ignore[operator]
        elif kind == "tanh":
            rows = rows.tanh()
            kept.append(rows)
        else:
            kept.append(rows.new_empty(0))  # its dtype
            rows = rows.to(value)  # type: ignore[arg-type]
    return rows, kept


def differentiated(steps: Sequence[Step], kept: Sequence[Tensor], grad: Tensor) -> Tensor:
    """The gradient of what went into the steps; `grad`, that of what came out, is written over where it can be."""
    remaining = list(kept)
    for kind, value in reversed(steps):
        if kind == "multiply":
            grad = grad.mul_(value)  # type: ignore[arg-type]
        elif kind == "divide":
            grad = grad.div_(value)  # type: ignore[arg-type]
        elif kind == "tanh":
            y = remaining.pop()
            grad = grad.mul_(1 - y.to(grad.dtype).square())
        else:
            grad = grad.to(remaining.pop().dtype)
    return grad
