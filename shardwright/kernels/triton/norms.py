"""RMS norm and layer norm as kernels: a program per row, and in backward per group of rows, whose weight gradients are
summed in one.

    rms     y = x r w                      r = 1 / sqrt(mean x^2 + eps)
    layer   y = (x - mean x) r w + b       r = 1 / sqrt(var x + eps)

with g = dy w, x^ what w multiplies:

    dx = r (g - x^ mean(g x^))             and for the layer norm - mean g inside of the brackets
    dw = sum over rows of dy x^            db = sum over rows of dy

They compute in fp32 (fp64 in fp64; eps is a constant of the kernel, because numbers that are handed to it are fp32).
`rounded` says whether x^ is rounded to the dtype of x before w multiplies it, as transformers' Llama does.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_SHORT = 2048  # columns of rows that are worked at by more programs at a time


@triton.jit
def _forward(
    x, weight, bias, y, mean, scale, columns, EPS: tl.constexpr, CENTERED: tl.constexpr, BIASED: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    values = tl.load(x + row.to(tl.int64) * columns + place, mask=inside, other=0.0).to(WIDE)
    if CENTERED:
        middle = tl.sum(values, 0) / columns
        values = tl.where(inside, values - middle, 0.0)
        tl.store(mean + row, middle)
    factor = 1.0 / tl.sqrt(tl.sum(values * values, 0) / columns + EPS)
    tl.store(scale + row, factor)
    values = values * factor
    if ROUNDED:
        values = values.to(x.dtype.element_ty).to(WIDE)
    values = values * tl.load(weight + place, mask=inside, other=0.0).to(WIDE)
    if BIASED:
        values += tl.load(bias + place, mask=inside, other=0.0).to(WIDE)
    tl.store(y + row.to(tl.int64) * columns + place, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy, x, weight, mean, scale, dx, dweight, dbias, rows, columns, each,
    CENTERED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < columns
    w = tl.load(weight + place, mask=inside, other=0.0).to(WIDE)
    dw = tl.zeros((BLOCK,), WIDE)
    db = tl.zeros((BLOCK,), WIDE)
    for row in range(program * each, min(program * each + each, rows)):
        at = tl.cast(row, tl.int64) * columns + place
        values = tl.load(x + at, mask=inside, other=0.0).to(WIDE)
        grad = tl.load(dy + at, mask=inside, other=0.0).to(WIDE)
        factor = tl.load(scale + row)
        if CENTERED:
            values = tl.where(inside, values - tl.load(mean + row), 0.0)
        values = values * factor
        dw += grad * values
        if BIASED:
            db += grad
        grad = grad * w
        result = grad - values * (tl.sum(grad * values, 0) / columns)
        if CENTERED:
            result -= tl.sum(grad, 0) / columns
        tl.store(dx + at, (result * factor).to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + program * columns + place, dw, mask=inside)
    if BIASED:
        tl.store(dbias + program * columns + place, db, mask=inside)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centered: bool, rounded: bool
    ) -> Tensor:
        columns = x.shape[-1]
        flat = x.reshape(-1, columns).contiguous()
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        y = torch.empty_like(flat, dtype=torch.promote_types(x.dtype, weight.dtype) if rounded else x.dtype)
        mean, scale = (flat.new_empty(len(flat), dtype=wide) for _ in range(2))
        if len(flat):
            _forward[(len(flat),)](
                flat, weight, bias, y, mean, scale, columns, EPS=eps, CENTERED=centered, BIASED=bias is not None,
                ROUNDED=rounded, BLOCK=triton.next_power_of_2(columns), WIDE=_wide(wide), num_warps=_warps(columns),
            )  # fmt: skip
        ctx.save_for_backward(flat, weight, mean, scale)
        ctx.centered, ctx.shape, ctx.bias = centered, x.shape, None if bias is None else bias.dtype
        return y.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        flat, weight, mean, scale = ctx.saved_tensors
        rows, columns = flat.shape
        programs = _programs(flat)
        dx = torch.empty_like(flat)
        dweight = (flat.new_empty if rows else flat.new_zeros)((programs, columns), dtype=scale.dtype)
        dbias = (torch.empty_like if rows else torch.zeros_like)(dweight) if ctx.bias is not None else None
        if rows:
            _backward[(programs,)](
                dy.reshape(rows, columns).contiguous(), flat, weight, mean, scale, dx, dweight, dbias, rows, columns,
                triton.cdiv(rows, programs), CENTERED=ctx.centered, BIASED=dbias is not None,
                BLOCK=triton.next_power_of_2(columns), WIDE=_wide(scale.dtype), num_warps=_warps(columns),
            )  # fmt: skip
        db = None if dbias is None else dbias.sum(0).to(ctx.bias)
        return dx.view(ctx.shape), dweight.sum(0).to(weight.dtype), db, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounded: bool = False) -> Tensor:
    """x [..., H], weight [H] -> [..., H]"""
    return _Norm.apply(x, weight, None, eps, False, rounded)  # type: ignore[no-any-return]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H], weight [H], bias [H] -> [..., H]"""
    return _Norm.apply(x, weight, bias, eps, True, False)  # type: ignore[no-any-return]


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _programs(x: Tensor) -> int:
    """Of a backward over x [rows, columns]. Each waits for its rows one after the other, so that short ones need many
    at a time; each leaves one more row of weight gradients to be summed, which costs long ones more.
    """
    processors = _processors(x.device) if x.is_cuda else 1
    return max(1, min(processors * (8 if x.shape[1] <= _SHORT else 2), x.shape[0]))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _warps(columns: int) -> int:
    return 4 if columns <= 2048 else 8 if columns <= 8192 else 16
