"""Linears in 8 bits as the documentation says them, in arithmetic that any float can do: no 8-bit dtype, no function of
the package.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

MOST = {"e4m3": 448.0, "e5m2": 57344.0}
BITS, LOWEST = {"e4m3": 3, "e5m2": 2}, {"e4m3": -6, "e5m2": -14}
KINDS = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}


def scale_of(amax: Tensor, kind: str) -> Tensor:
    return torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax.double() / MOST[kind]))), 1.0)


def rounded(x: Tensor, scale: Tensor, kind: str) -> Tensor:
    """To the nearest number of the format, ties to the one that ends in 0; what is too large to the largest."""
    values = (x.double() / scale).clamp(-MOST[kind], MOST[kind])
    _, exponent = torch.frexp(values)
    step = torch.exp2((exponent - 1).clamp(min=LOWEST[kind]).double() - BITS[kind])
    return torch.round(values / step) * step * scale


class Recipe:
    """Scales of one model. `begin_step` moves what was seen to the history."""

    def __init__(
        self, granularity: str = "tensorwise", scaling: str = "current", amax_history: int | None = None
    ) -> None:
        self.rowwise, self.delayed, self.steps = granularity == "rowwise", scaling == "delayed", amax_history or 16
        self.seen: dict[Any, float] = {}
        self.history: dict[Any, list[float]] = {}

    def end_step(self) -> None:
        for key, amax in self.seen.items():
            if amax:  # zeros tell nothing
                self.history[key] = [amax, *self.history.get(key, [])][: self.steps]
        self.seen = {}

    def round(self, name: str, factor: str, x: Tensor) -> Tensor:
        """`x` [rows, K], of which rows are what rowwise scales are for."""
        kind = KINDS[factor]
        if self.rowwise:
            return rounded(x, scale_of(x.abs().amax(1, keepdim=True), kind), kind)
        amax = x.abs().amax()
        if self.delayed:
            self.seen[name, factor] = max(self.seen.get((name, factor), 0.0), float(amax))
            if (name, factor) in self.history:
                amax = torch.tensor(max(self.history[name, factor]), dtype=torch.float64)
        return rounded(x, scale_of(amax, kind), kind)


class ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: Recipe, name: str) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.recipe, ctx.name = recipe, name
        flat = x.reshape(-1, x.shape[-1])
        y = recipe.round(name, "x", flat) @ recipe.round(name, "w", w).t()
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, w = ctx.saved_tensors
        q: Callable[[str, Tensor], Tensor] = partial(ctx.recipe.round, ctx.name)
        flat_x, flat_dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        dx = q("dy", flat_dy) @ q("w", w.t()).t()
        dw = q("dy", flat_dy.t()) @ q("x", flat_x.t()).t()
        return dx.to(x.dtype).view_as(x), dw.to(w.dtype), None, None


def compute_by_hand(layers: nn.Module, recipe: Recipe) -> None:
    """All linears of `layers`."""
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear):

            def forward(x: Tensor, module: nn.Linear = module, name: str = name) -> Tensor:
                y = ByHand.apply(x, module.weight, recipe, name)
                return y if module.bias is None else y + module.bias

            module.forward = forward
