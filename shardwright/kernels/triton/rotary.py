"""Rotary positions by halves, as Llama has them, as a kernel.

y = x cos + rotated(x) sin      rotated([a, b]) = [-b, a]
dx is the same with the other sign of the rotation, and sin and cos exchanged by halves
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x, cos, sin, y, heads, length, half, by_batch, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)  # of [B, heads, length]
    position = row % length + (row // (length * heads)) * length * by_batch
    place = tl.arange(0, BLOCK)
    inside = place < half
    at = x + row * 2 * half + place
    first = tl.load(at, mask=inside, other=0.0).to(WIDE)
    second = tl.load(at + half, mask=inside, other=0.0).to(WIDE)
    angle = position * 2 * half + place
    cos1 = tl.load(cos + angle, mask=inside, other=0.0).to(WIDE)
    cos2 = tl.load(cos + angle + half, mask=inside, other=0.0).to(WIDE)
    sin1 = tl.load(sin + angle, mask=inside, other=0.0).to(WIDE)
    sin2 = tl.load(sin + angle + half, mask=inside, other=0.0).to(WIDE)
    if TRANSPOSED:
        left = first * cos1 + second * sin2
        right = second * cos2 - first * sin1
    else:
        left = first * cos1 - second * sin1
        right = second * cos2 + first * sin2
    to = y + row * 2 * half + place
    tl.store(to, left.to(y.dtype.element_ty), mask=inside)
    tl.store(to + half, right.to(y.dtype.element_ty), mask=inside)


def _run(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    batch, heads, length, width = x.shape
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _rotate[(batch * heads * length,)](
            x, cos, sin, y, heads, length, width // 2, int(cos.shape[0] > 1), TRANSPOSED=transposed,
            BLOCK=triton.next_power_of_2(width // 2), WIDE=tl.float64 if x.dtype == torch.float64 else tl.float32,
        )  # fmt: skip
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(cos, sin)
        return _run(x, cos, sin, False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _run(dy, cos, sin, True), None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, S, D]; cos, sin [B or 1, S, D], without gradients -> [B, heads, S, D]"""
    return _Rotary.apply(x, cos, sin)  # type: ignore[no-any-return]
