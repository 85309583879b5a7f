"""act(gate) * up as a kernel; what it keeps for backward are its inputs.

    silu        a = g s                   a' = s (1 + g (1 - s))              s = 1 / (1 + exp(-g))
    gelu        a = g p                   a' = p + g exp(-g^2 / 2) / sqrt(2 pi)    p = (1 + erf(g / sqrt 2)) / 2
    gelu_tanh   a = g s                   a' = s + g s (1 - s) u'             s = 1 / (1 + exp(-u)),
                                                                              u = 2 sqrt(2 / pi) (g + 0.044715 g^3)

(1 + tanh(u / 2)) / 2 is the s of the last. Halves of a packed projection are read where they are, row by row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


@triton.jit
def _activation(g, KIND: tl.constexpr):
    """a, a'"""
    if KIND == 1:
        share = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        slope = share + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
    else:
        inner = g
        rise = tl.full(g.shape, 1.0, g.dtype)
        if KIND == 2:
            inner = 1.5957691216057308 * (g + 0.044715 * g * g * g)
            rise = 1.5957691216057308 * (1.0 + 0.134145 * g * g)
        share = 1.0 / (1.0 + tl.exp(-inner))
        slope = share + g * share * (1.0 - share) * rise
    return g * share, slope


@triton.jit
def _forward(
    gate, up, y, gate_row, up_row, columns, KIND: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < columns
    g = tl.load(gate + row * gate_row + place, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up + row * up_row + place, mask=inside, other=0.0).to(WIDE)
    active, _ = _activation(g, KIND)
    active = active.to(gate.dtype.element_ty).to(WIDE)  # rounded, as torch's own is
    tl.store(y + row * columns + place, (active * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy, gate, up, dgate, dup, gate_row, up_row, columns,
    KIND: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < columns
    g = tl.load(gate + row * gate_row + place, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up + row * up_row + place, mask=inside, other=0.0).to(WIDE)
    grad = tl.load(dy + row * columns + place, mask=inside, other=0.0).to(WIDE)
    active, slope = _activation(g, KIND)
    tl.store(dup + row * columns + place, (grad * active).to(dup.dtype.element_ty), mask=inside)
    tl.store(dgate + row * columns + place, (grad * u * slope).to(dgate.dtype.element_ty), mask=inside)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        g, u = _rows(gate), _rows(up)
        y = g.new_empty(g.shape)
        if y.numel():
            _forward[_grid(y)](
                g, u, y, g.stride(0), u.stride(0), y.shape[1], KIND=_KINDS[kind], BLOCK=_BLOCK, WIDE=_wide(y)
            )
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return y.view(gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        g, u = _rows(gate), _rows(up)
        dgate, dup = g.new_empty(g.shape), g.new_empty(g.shape)
        if dy.numel():
            _backward[_grid(g)](
                dy.reshape(g.shape).contiguous(), g, u, dgate, dup, g.stride(0), u.stride(0), g.shape[1],
                KIND=_KINDS[ctx.kind], BLOCK=_BLOCK, WIDE=_wide(g),
            )  # fmt: skip
        return dgate.view(gate.shape), dup.view(up.shape), None


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """gate, up [...] -> [...]; kind: silu, gelu or gelu_tanh"""
    return _Gated.apply(gate, up, kind)  # type: ignore[no-any-return]


def _rows(x: Tensor) -> Tensor:
    """[rows, columns], where a column follows the one before it."""
    flat = x.reshape(-1, x.shape[-1]) if x.ndim else x.reshape(1, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], triton.cdiv(x.shape[1], _BLOCK)


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
