"""silu(gate) * up as a kernel; what it keeps for backward are its inputs.

y = gate sigmoid(gate) up       d gate = dy up sigmoid(gate) (1 + gate (1 - sigmoid(gate)))       d up = dy silu(gate)
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _forward(gate, up, y, number, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    g = tl.load(gate + place, mask=inside, other=0.0).to(WIDE)
    silu = (g / (1.0 + tl.exp(-g))).to(gate.dtype.element_ty).to(WIDE)  # rounded, as torch's own is
    result = silu * tl.load(up + place, mask=inside, other=0.0).to(WIDE)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy, gate, up, dgate, dup, number, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < number
    grad = tl.load(dy + place, mask=inside, other=0.0).to(WIDE)
    g = tl.load(gate + place, mask=inside, other=0.0).to(WIDE)
    u = tl.load(up + place, mask=inside, other=0.0).to(WIDE)
    share = 1.0 / (1.0 + tl.exp(-g))
    tl.store(dup + place, (grad * g * share).to(dup.dtype.element_ty), mask=inside)
    slope = share * (1.0 + g * (1.0 - share))
    tl.store(dgate + place, (grad * u * slope).to(dgate.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        y = torch.empty_like(gate)
        if y.numel():
            _forward[(triton.cdiv(y.numel(), _BLOCK),)](gate, up, y, y.numel(), BLOCK=_BLOCK, WIDE=_wide(y))
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        if dy.numel():
            _backward[(triton.cdiv(dy.numel(), _BLOCK),)](
                dy.contiguous(), gate, up, dgate, dup, dy.numel(), BLOCK=_BLOCK, WIDE=_wide(dy)
            )
        return dgate, dup


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [...] -> [...]"""
    return _SwiGLU.apply(gate, up)  # type: ignore[no-any-return]


def _wide(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
