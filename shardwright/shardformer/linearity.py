"""Proof that a module's output is a sum: whether adding up ranks' partial sums may wait until the module returns.

The module runs on tensors without data, and every tensor that was computed from partial sums is followed operator by
operator. What keeps f(sum of p_r) = sum of f(p_r) goes on: sums of partial sums, products with something whole, other
views of the same numbers. What does not (a norm, an activation, a whole tensor added, dropout) ends the proof, as does
an operator that is not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ..models.dry_run import meta_copy, without_data
from ..utils.pytree import TorchDispatchMode, tree_leaves

_SUMS = {"add", "add_", "sub", "sub_"}
_PRODUCTS = {"mul", "mul_", "mm", "bmm", "matmul"}
_QUOTIENTS = {"div", "div_"}
_JOINS = {"cat", "stack"}
_SAME_NUMBERS = {
    *("view", "_unsafe_view", "reshape", "_reshape_alias", "alias", "clone", "contiguous", "detach", "_to_copy"),
    *("transpose", "t", "permute", "movedim", "expand", "unsqueeze", "squeeze", "select", "slice", "split"),
    *("split_with_sizes", "unbind", "neg", "sum"),
}


def why_no_sum(block: nn.Module, parts: Collection[str], width: int) -> str | None:
    """What keeps the output of `block` from being linear in the outputs of its modules `parts` together; None if it is.

    parts   names below `block`: linears, or modules (experts) whose output has the shape of their first argument
    width   features of what the block takes, [batch, tokens, width]
    """
    for training in (True, False):
        try:
            reason = _reason(meta_copy(block).train(training), parts, width)
        except Exception as error:  # a foreign forward on made-up tensors
            reason = f"it does not run on [2, 3, {width}] alone ({type(error).__name__}: {error})"
        if reason is not None:
            return reason
    return None


def _reason(copied: nn.Module, parts: Collection[str], width: int) -> str | None:
    follow = _Follow()
    for name in parts:
        part = copied.get_submodule(name)
        if not hasattr(part, "weight"):
            part.forward = _like_first  # type: ignore[method-assign,assignment]
        part.register_forward_hook(follow.note)
    dtype = next(param.dtype for param in copied.parameters() if param.is_floating_point())
    with without_data(), torch.no_grad(), follow:
        output = copied(torch.empty(2, 3, width, dtype=dtype))
    if follow.ended is not None:
        return f"{follow.ended} is applied to what they return"
    return None if follow.is_partial(output) else "what it returns is more, or other, than what they return"


def _like_first(x: Tensor, *others: Any, **named: Any) -> Tensor:
    return torch.empty_like(x)


class _Follow(TorchDispatchMode):
    """Knows which tensors are partial sums.

    ended   the first operator that is not linear in them
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: str | None = None
        self._partial: dict[int, Tensor] = {}  # kept, so that an id stays its own

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self._partial[id(output)] = output

    def is_partial(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._partial

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        met = any(self.is_partial(value) for value in tree_leaves((args, kwargs)))
        output = func(*args, **kwargs)
        if met:
            if not self._keeps_sums(func, args, kwargs):
                self.ended = self.ended or func._opname
            for value in tree_leaves(output):
                if isinstance(value, Tensor):
                    self._partial[id(value)] = value
        return output

    def _keeps_sums(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        name = func._opname
        if any(self.is_partial(value) for value in tree_leaves(kwargs)):
            return False
        first, second = args[0], args[1] if len(args) > 1 else None
        if name in _SUMS:
            return self.is_partial(first) and self.is_partial(second)
        if name in _PRODUCTS:
            return self.is_partial(first) != self.is_partial(second)
        if name in _QUOTIENTS:
            return self.is_partial(first) and not self.is_partial(second)
        if name in _JOINS:
            return all(self.is_partial(value) for value in first)
        return name in _SAME_NUMBERS and self.is_partial(first) and kwargs.get("dtype", torch.float).is_floating_point
