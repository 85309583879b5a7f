"""RMS norm and layer norm in one kernel: liger-kernel's where it is installed, else our Triton kernels, both on CUDA;
torch's own operators elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .backends import has_triton, liger, operators_only, stands_for_gpu, triton_kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / rms(x) * (offset + weight); x [..., H], weight [H].

    With an offset all of it is computed in fp32 and rounded at the end, as Gemma does; without one, x / rms(x) is
    rounded before the weight multiplies it, as Llama does (by torch's operator at the end alone).
    """
    plain = operators_only()
    if x.is_cuda and not plain and liger("rms_norm") is not None:
        casting = "gemma" if offset else "llama"
        return liger("rms_norm").apply(x, weight, eps, offset, casting, False)  # type: ignore[no-any-return]
    kernels = None if plain else triton_kernels("norms", x)
    planned = not plain and stands_for_gpu(x)
    if offset:
        wide = weight.float() if x.dtype.itemsize < 4 else weight
        if kernels is not None:
            return kernels.rms_norm(x, wide + offset, eps)  # type: ignore[no-any-return]
        if planned:
            return _AsOneKernel.apply(x, wide + offset)  # type: ignore[no-any-return]
        wider = x.float() if x.dtype.itemsize < 4 else x
        return F.rms_norm(wider, weight.shape, wide + offset, eps).to(x.dtype)
    if kernels is not None:
        return kernels.rms_norm(x, weight, eps, rounded=True)  # type: ignore[no-any-return]
    return _AsOneKernel.apply(x, weight) if planned else F.rms_norm(x, weight.shape, weight, eps)


class _AsOneKernel(torch.autograd.Function):
    """Of tensors without memory: what `triton.norms` reads, makes and keeps for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return (x * weight.to(x.dtype)).to(torch.promote_types(x.dtype, weight.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return dy.to(x.dtype) * x, torch.empty_like(weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., H], weight [H], bias [H]"""
    if operators_only():
        return F.layer_norm(x, weight.shape, weight, bias, eps)
    if x.is_cuda and bias is not None and liger("layer_norm") is not None:
        return liger("layer_norm").apply(x, weight, bias, eps)  # type: ignore[no-any-return]
    kernels = triton_kernels("norms", x)
    if kernels is not None:
        return kernels.layer_norm(x, weight, bias, eps)  # type: ignore[no-any-return]
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def has_layer_norm() -> bool:
    """Whether there is another kernel for layer norms than torch's own."""
    return torch.cuda.is_available() and (has_triton() or liger("layer_norm") is not None)
