"""Gated activations and rotary positions in one against torch, and who computes them."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.kernels import backends, gated, norms
from shardwright.kernels.gated import ACTIVATIONS
from shardwright.kernels.rotary import FORMS, Form, rotated


def as_written(x: Tensor, cos: Tensor, sin: Tensor, form: Form, heads: int) -> Tensor:
    """x cos + rotated(x) sin, as modeling files have it."""
    width = form.width(cos)
    if form.angles == "first":
        cos, sin = (angle[..., : width // 2].repeat_interleave(2, dim=-1) for angle in (cos, sin))
    elif form.angles == "half":
        both = (lambda a: torch.cat([a, a], -1)) if form.left == "halves" else lambda a: a.repeat_interleave(2, -1)
        cos, sin = both(cos), both(sin)
    cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)
    turned, rest = x[..., :width], x[..., width:]
    if form.taken != form.left:
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], -1)
    if form.left == "halves":
        other = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], -1)
    else:
        other = torch.stack([-turned[..., 1::2], turned[..., 0::2]], -1).flatten(-2)
    return torch.cat([turned * cos + other * sin, rest], -1)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated_activations_in_torch(kind: str) -> None:
    """Gradients, those of gradients, and what is kept: gate and up alone."""
    gate, up = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True).unbind()
    packed = torch.randn(3, 14, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(gated.gated(gate, up, kind), ACTIVATIONS[kind](gate) * up, rtol=0, atol=0)
    assert torch.autograd.gradcheck(lambda x: gated.gated(*x.chunk(2, -1), kind), packed)
    assert torch.autograd.gradgradcheck(lambda x: gated.gated(*x.chunk(2, -1), kind), packed)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        gated.gated(gate, up, kind)
    assert sum(x.numel() for x in kept) == 2 * gate.numel()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_rotary_positions_in_torch(form: Form) -> None:
    for heads, rest, samples in ((1, 3, 2), (2, 0, 1)):
        x = torch.randn(2, 3, 3, 6 + rest, dtype=torch.float64, requires_grad=True)
        cos, sin = torch.randn(2, samples, 3, 3 if form.angles == "half" else 6, dtype=torch.float64)
        found, expected = rotated(x, cos, sin, form, heads), as_written(x, cos, sin, form, heads)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        dy = torch.randn_like(x)
        torch.testing.assert_close(*(torch.autograd.grad(y, x, dy)[0] for y in (found, expected)), rtol=0, atol=1e-12)
        assert torch.autograd.gradgradcheck(lambda x: rotated(x, cos, sin, form, heads), x)  # noqa: B023
    half = x.detach().bfloat16()
    exact = rotated(half.double(), cos.bfloat16().double(), sin.bfloat16().double(), form, 2)
    wide = rotated(half, cos.bfloat16(), sin.bfloat16(), form._replace(wide=True), 2)
    torch.testing.assert_close(wide, exact.float().bfloat16(), rtol=1e-2, atol=1e-6)


class _OnDevice(Tensor):
    """Says that it lies on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def test_liger_kernel_is_given_gate_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package in its place, which like it writes gradients over what it was given, so that there is one backward."""

    class InPlace(torch.autograd.Function):
        calls: list[str] = []

        @classmethod
        def kind(cls) -> str:
            return "silu" if "SiLU" in cls.__name__ else "gelu_tanh"

        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a.clone()

        @staticmethod
        def backward(ctx: Any, dc: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            return a.fill_(1) * dc, b.fill_(2) * dc

    for name, function in (("swiglu", "LigerSiLUMulFunction"), ("geglu", "LigerGELUMulFunction")):
        module = ModuleType(f"liger_kernel.ops.{name}")

        class Named(InPlace):
            apply_calls: list[tuple[Tensor, Tensor]] = []

            @classmethod
            def apply(cls, *args: Any) -> Any:
                cls.apply_calls.append(args)
                return super().apply(*(x.as_subclass(Tensor) for x in args))

        setattr(module, function, Named)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "is_installed", lambda name: True)
    backends.liger.cache_clear()
    try:
        for kind, name in (("silu", "swiglu"), ("gelu_tanh", "geglu")):
            gate, up = torch.randn(2, 3, 4, requires_grad=True).unbind()
            one, other = gate.as_subclass(_OnDevice), up.as_subclass(_OnDevice)
            y = gated.gated(one, other, kind)
            calls = backends.liger(name).apply_calls
            assert calls[-1][0] is one
            assert calls[-1][1] is other
            y.sum().backward(retain_graph=True)
            with pytest.raises(ValueError, match="a second time"):
                y.sum().backward()
        monkeypatch.setattr(
            gated, "triton_kernels", lambda *_: None
        )  # not of liger-kernel's: exact GELU, fp64, nothing
        count = sum(len(backends.liger(name).apply_calls) for name in ("swiglu", "geglu"))
        for x, kind in ((torch.randn(3), "gelu"), (torch.randn(3).double(), "silu"), (torch.randn(0), "silu")):
            gated.gated(x.as_subclass(_OnDevice), x.as_subclass(_OnDevice), kind)
        assert count == sum(len(backends.liger(name).apply_calls) for name in ("swiglu", "geglu")) == 2
    finally:
        backends.liger.cache_clear()


def test_liger_kernel_is_given_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's and Gemma's, which differ in what is computed in 32 bits, never in place; layer norms with a bias."""
    calls: list[tuple[Any, ...]] = []
    for name, function in (("rms_norm", "LigerRMSNormFunction"), ("layer_norm", "LigerLayerNormFunction")):
        module: Any = ModuleType(f"liger_kernel.ops.{name}")
        setattr(module, function, type(function, (), {"apply": staticmethod(lambda *args: calls.append(args))}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "is_installed", lambda name: True)
    backends.liger.cache_clear()
    try:
        x, weight, bias = torch.randn(2, 3).as_subclass(_OnDevice), torch.randn(3), torch.randn(3)
        norms.rms_norm(x, weight, 1e-6)
        norms.rms_norm(x, weight, 1e-5, offset=1.0)
        norms.layer_norm(x, weight, bias, 1e-5)
    finally:
        backends.liger.cache_clear()
    assert [call[2:] for call in calls] == [(1e-6, 0.0, "llama", False), (1e-5, 1.0, "gemma", False), (bias, 1e-5)]
    assert all(call[0] is x and call[1] is weight for call in calls)
