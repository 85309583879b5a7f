"""Rotary positions as a kernel: a program per token and few heads, so that angles are read once for them.

See `kernels.rotary` for the formulas and the forms; x is read where it is, whatever its strides.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8  # of a program
_PLACES = {"halves": lambda half: (1, half), "neighbours": lambda half: (2, 1)}  # of pair i: i step, and how far apart


@triton.jit
def _rotate(
    x, cos, sin, y, heads, length, half, rest,
    x_batch, x_head, x_token, y_batch, y_head, y_token, angle_batch, angle_token,
    x_step, x_apart, y_step, y_apart, angle_step, angle_apart,
    BACK: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = (tl.program_id(0) % length).to(tl.int64)
    # heads of a long sequence may lie further apart than 32 bits count
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    place = tl.arange(0, BLOCK)[None, :]
    angle = batch * angle_batch + token * angle_token + place * angle_step
    known = place < half
    cos_a = tl.load(cos + angle, mask=known, other=0.0).to(WIDE)
    cos_b = tl.load(cos + angle + angle_apart, mask=known, other=0.0).to(WIDE)
    sin_a = tl.load(sin + angle, mask=known, other=0.0).to(WIDE)
    sin_b = tl.load(sin + angle + angle_apart, mask=known, other=0.0).to(WIDE)
    inside = (head < heads) & known
    x_at = x + batch * x_batch + token * x_token + head * x_head
    y_at = y + batch * y_batch + token * y_token + head * y_head
    a = tl.load(x_at + place * x_step, mask=inside, other=0.0).to(WIDE)
    b = tl.load(x_at + place * x_step + x_apart, mask=inside, other=0.0).to(WIDE)
    if BACK:
        left = a * cos_a + b * sin_b
        right = b * cos_b - a * sin_a
    else:
        left = a * cos_a - b * sin_a
        right = b * cos_b + a * sin_b
    tl.store(y_at + place * y_step, left.to(y.dtype.element_ty), mask=inside)
    tl.store(y_at + place * y_step + y_apart, right.to(y.dtype.element_ty), mask=inside)
    if REST:
        behind = tl.arange(0, REST)[None, :]
        inside = (head < heads) & (behind < rest)
        tl.store(y_at + 2 * half + behind, tl.load(x_at + 2 * half + behind, mask=inside, other=0.0), mask=inside)


def _run(x: Tensor, cos: Tensor, sin: Tensor, form: Any, heads: int, back: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty_like(x)
    batch, length, number, features = x.shape[0], x.shape[3 - heads], x.shape[heads], x.shape[3]
    width = form.width(cos)
    half = width // 2
    orders = (form.left, form.taken) if back else (form.taken, form.left)
    angles = _PLACES[form.left](half) if form.angles == "each" else (1, 0)
    if x.numel():
        _rotate[(batch * length, triton.cdiv(number, _HEADS))](
            x, cos, sin, y, number, length, half, features - width,
            x.stride(0), x.stride(heads), x.stride(3 - heads), y.stride(0), y.stride(heads), y.stride(3 - heads),
            cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            *_PLACES[orders[0]](half), *_PLACES[orders[1]](half), *angles,
            BACK=back, HEADS=_HEADS, BLOCK=triton.next_power_of_2(max(half, 1)),
            REST=triton.next_power_of_2(features - width) if features > width else 0,
            WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        )  # fmt: skip
    return y


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, form: Any, heads: int) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        ctx.how = form, heads
        return _run(x, cos, sin, form, heads, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        form, heads = ctx.how
        return _run(dy, cos, sin, form, heads, True), None, None, None, None


def rotated(x: Tensor, cos: Tensor, sin: Tensor, form: Any, heads: int) -> Tensor:
    """See `kernels.rotary.rotated`."""
    return _Rotated.apply(x, cos, sin, form, heads)  # type: ignore[no-any-return]
