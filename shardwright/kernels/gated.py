"""act(gate) * up in one, as the MLPs of most models have it, with act SiLU (SwiGLU) or GELU (GeGLU).

    y = act(gate) up          d gate = dy up act'(gate)          d up = dy act(gate)

Kept for backward are gate and up alone; autograd would keep act(gate) too. liger-kernel's kernels where it is
installed, else our Triton kernels, both on CUDA; torch's operators elsewhere, with the numbers that they have without
this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends import liger, operators_only, triton_kernels

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
_LIGER = {"silu": "swiglu", "gelu_tanh": "geglu"}
_aten: Any = torch.ops.aten


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """gate, up [..., I] of one shape and dtype -> [..., I]; `kind` is one of `ACTIVATIONS`."""
    if operators_only():
        return ACTIVATIONS[kind](gate) * up
    wants = gate.is_cuda and kind in _LIGER and gate.dtype != torch.float64 and gate.numel()  # which they are not for
    if wants and liger(_LIGER[kind]) is not None:
        return _once(liger(_LIGER[kind]).apply(gate, up))
    kernels = triton_kernels("gated", gate)
    if kernels is not None:
        return kernels.gated(gate, up, kind)  # type: ignore[no-any-return]
    return _Gated.apply(gate, up, kind)  # type: ignore[no-any-return]


def _slope(dy: Tensor, gate: Tensor, kind: str) -> Tensor:
    """dy act'(gate), written over dy where nobody differentiates it."""
    over = {} if torch.is_grad_enabled() else {"grad_input": dy}
    if kind != "silu":
        backward = _aten.gelu_backward.grad_input if over else _aten.gelu_backward
        return backward(dy, gate, approximate="tanh" if kind == "gelu_tanh" else "none", **over)  # type: ignore[no-any-return]
    if over:
        return _aten.silu_backward.grad_input(dy, gate, **over)  # type: ignore[no-any-return]
    share = torch.sigmoid(gate)  # torch's operator has no derivative of its own
    return dy * share * (1 + gate * (1 - share))


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return ACTIVATIONS[kind](gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        dgate = _slope(dy * up, gate, ctx.kind) if ctx.needs_input_grad[0] else None
        dup = None
        if ctx.needs_input_grad[1]:
            active = ACTIVATIONS[ctx.kind](gate)
            dup = dy * active if torch.is_grad_enabled() else active.mul_(dy)
        return dgate, dup, None


def _once(y: Tensor) -> Tensor:
    """liger-kernel writes the gradients over gate and up, so that a second backward would start from wrong numbers."""
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(_Once())
    return y


class _Once:
    def __init__(self) -> None:
        self.ran = False

    def __call__(self, grads: Any) -> None:
        if self.ran:
            raise ValueError(
                "backward through a gated activation a second time (retain_graph=True): liger-kernel has written its "
                "gradients over what the first one kept; use enable_fused_activation=False, or uninstall liger-kernel"
            )
        self.ran = True
