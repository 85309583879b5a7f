"""What a tensor was computed by, as autograd remembers it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def grad_fns_of(tensor: torch.Tensor) -> Iterator[Any]:
    """Every grad_fn on the way to `tensor`, its own first."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set()
    while waiting:
        grad_fn = waiting.pop()
        if grad_fn is None or grad_fn in seen:
            continue
        seen.add(grad_fn)
        yield grad_fn
        waiting += [before for before, _ in grad_fn.next_functions]
