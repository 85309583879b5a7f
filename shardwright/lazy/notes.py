"""What a lazily built parameter carries: how to make it, as the calls that its constructor made on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NOTES = "_shardwright_notes"
_ALIAS = "_shardwright_alias"


class Step(NamedTuple):
    """One noted call: `func(target, *args, **kwargs)` with the target at position or keyword `place`."""

    func: Callable[..., Any]
    place: int | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: tuple[Callable[[Any], Any], ...] = ()  # from the parameter to the view that is the target

    def run(self, full: Tensor) -> None:
        target: Any = full
        for step in self.path:
            target = step(target)
        args, kwargs = list(self.args), dict(self.kwargs)
        if isinstance(self.place, int):
            args[self.place] = target
        else:
            kwargs[self.place] = target
        self.func(*args, **kwargs)


class Notes:
    """How to make one parameter at full size.

    seed, device    as given to the `LazyInitContext`
    obstacle        why it cannot be made, or None
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device | str | None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.seed, self.device = seed, device
        self.steps: list[Step] = []
        self.obstacle: str | None = "was never initialised"

    def add(self, step: Step, overwrites: bool, obstacle: str | None = None) -> None:
        if overwrites:
            self.steps, self.obstacle = [], None
        self.steps.append(step)
        self.obstacle = obstacle or self.obstacle

    @torch.no_grad()
    def make(self, seed: int, full: Tensor) -> Tensor:
        """Fill `full`, of this parameter's shape and dtype on the CPU; the global generator stays as it was."""
        assert self.obstacle is None
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            for step in self.steps:
                step.run(full)
        finally:
            torch.set_rng_state(state)
        return full


class Alias(NamedTuple):
    """A tensor that shares the memory of a noted parameter."""

    notes: Notes
    path: tuple[Callable[[Any], Any], ...]
    whole: bool


def notes_of(param: Tensor) -> Notes | None:
    """How to make `param`, or None when it was not built lazily."""
    notes: Notes | None = getattr(param, _NOTES, None)
    return notes


def set_notes(param: Tensor, notes: Notes) -> None:
    setattr(param, _NOTES, notes)


def alias_of(tensor: Tensor) -> Alias | None:
    """Which parameter built lazily `tensor` is, or is a view of; None for all others."""
    notes = notes_of(tensor)
    return Alias(notes, (), True) if notes is not None else getattr(tensor, _ALIAS, None)


def set_alias(tensor: Tensor, alias: Alias) -> None:
    setattr(tensor, _ALIAS, alias)
