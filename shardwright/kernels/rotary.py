"""Rotary positions: pairs of features turned by an angle, in one.

With (a, b) a pair of x, and the cos and sin that belong to each of the two:

    y_a = a cos_a - b sin_a         dx_a = dy_a cos_a + dy_b sin_b
    y_b = b cos_b + a sin_b         dx_b = dy_b cos_b - dy_a sin_a

Features behind the last pair are handed through. Nothing but cos and sin is kept for backward. Our Triton kernel on
CUDA, torch's operators elsewhere: liger-kernel's function writes over the q and k that it is given, which only whoever
wrote the model knows to be harmless, and takes cos_a = cos_b for granted.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .backends import triton_kernels

Order = Literal["halves", "neighbours"]


class Form(NamedTuple):
    """How a family writes it down, over R features.

    taken, left     which features make pair i, of what goes in and of what comes out: i and i + R/2, or 2i and 2i + 1
    angles          cos and sin are [..., R], one for every feature that comes out ("each") or with those of pair i at
                    place i ("first"), or [..., R/2] ("half")
    wide            numbers of 16 bits are computed in 32, and rounded at the end
    """

    taken: Order
    left: Order
    angles: Literal["each", "first", "half"]
    wide: bool = False

    def width(self, cos: Tensor) -> int:
        """R"""
        return cos.shape[-1] * (2 if self.angles == "half" else 1)


FORMS = (
    Form("halves", "halves", "each"),
    Form("neighbours", "neighbours", "each"),
    Form("neighbours", "neighbours", "first"),
    Form("neighbours", "halves", "each"),
    Form("halves", "halves", "half"),
    Form("neighbours", "neighbours", "half"),
)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, form: Form, heads: int = 1) -> Tensor:
    """x [B, h, S, D] with heads=1, or [B, S, h, D] with heads=2; cos, sin [B or 1, S, R or R/2], without gradients."""
    kernels = triton_kernels("rotary", x)
    if kernels is not None:
        return kernels.rotated(x, cos, sin, form, heads)  # type: ignore[no-any-return]
    return _Rotated.apply(x, cos, sin, form, heads, False)  # type: ignore[no-any-return]


def _pairs(x: Tensor, order: Order) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    return (x[..., :half], x[..., half:]) if order == "halves" else (x[..., 0::2], x[..., 1::2])


def _angles(angles: Tensor, form: Form, heads: int) -> tuple[Tensor, Tensor]:
    """Of the first and of the second of each pair."""
    angles = angles.unsqueeze(heads)
    if form.angles == "each":
        return _pairs(angles, form.left)
    first = angles if form.angles == "half" else angles[..., : angles.shape[-1] // 2]
    return first, first


def _turn(x: Tensor, cos: Tensor, sin: Tensor, form: Form, heads: int, back: bool) -> Tensor:
    """back: the transposed of it, from features as they come out to those that go in"""
    width, half = form.width(cos), x.dtype if form.wide and x.dtype.itemsize < 4 else None
    if half is not None:
        x, cos, sin = x.float(), cos.float(), sin.float()
    y = torch.empty_like(x)
    orders = (form.left, form.taken) if back else (form.taken, form.left)
    (a, b), (to_a, to_b) = _pairs(x[..., :width], orders[0]), _pairs(y[..., :width], orders[1])
    (cos_a, cos_b), (sin_a, sin_b) = _angles(cos, form, heads), _angles(sin, form, heads)
    if back:
        torch.mul(a, cos_a, out=to_a).addcmul_(b, sin_b)
        torch.mul(b, cos_b, out=to_b).addcmul_(a, sin_a, value=-1)
    else:
        torch.mul(a, cos_a, out=to_a).addcmul_(b, sin_a, value=-1)
        torch.mul(b, cos_b, out=to_b).addcmul_(a, sin_b)
    if width < x.shape[-1]:
        y[..., width:] = x[..., width:]
    return y if half is None else y.to(half)


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, form: Form, heads: int, back: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how = form, heads, not back
        return _turn(x, cos, sin, form, heads, back)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _Rotated.apply(dy, cos, sin, *ctx.how), None, None, None, None, None
