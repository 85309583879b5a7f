"""Operators that torch dispatches, counted: what a GPU would be asked to launch, and what costs the host time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ..utils.pytree import TorchDispatchMode

# They make another view of the same memory, or room for it, and launch nothing.
_VIEWS = (
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "as_strided", "alias", "detach", "t", "transpose"),
    *("permute", "expand", "select", "slice", "narrow", "unfold", "diagonal", "unsqueeze", "squeeze", "unbind"),
    *("split", "split_with_sizes", "lift_fresh", "_local_scalar_dense"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"),
)


class Operators(TorchDispatchMode):
    """`counts` operators by name while the mode is on, without views and allocations, which launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in _VIEWS:
            self.counts[name if func.namespace == "aten" else f"{func.namespace}.{name}"] += 1
        return func(*args, **(kwargs or {}))


def per_layer(fewer: Counter[str], more: Counter[str], layers: int) -> dict[str, float]:
    """What each of the `layers` by which two models differ adds."""
    return {name: (more[name] - fewer[name]) / layers for name in sorted({*fewer, *more}) if more[name] != fewer[name]}


def more_than(counts: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """By operator, how many more there are than in `others`; negative where there are fewer."""
    names = sorted({*counts, *others})
    found = {name: counts.get(name, 0) - others.get(name, 0) for name in names}
    return {name: number for name, number in found.items() if number}


def counted(step: Any) -> Counter[str]:
    """What `step()` dispatches."""
    with Operators() as operators, torch.enable_grad():
        step()
    return operators.counts
