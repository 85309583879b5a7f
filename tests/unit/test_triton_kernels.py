"""Triton kernels against torch's own operators, on a CPU by Triton's interpreter and on a GPU when there is one.

Sizes are odd, rows many enough that programs have several, columns more than a block where blocks are made small.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from shardwright.kernels import cross_entropy_rows as rows  # noqa: E402
from shardwright.kernels.triton import cross_entropy, norms, rotary, swiglu  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE).requires_grad_()


def same(found: Any, expected: Any, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


def same_gradients(mine: Tensor, theirs: Tensor, params: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    same(mine, theirs, dtype)
    dy = torch.randn_like(theirs)
    for one, other in zip(torch.autograd.grad(mine, params, dy), torch.autograd.grad(theirs, params, dy), strict=True):
        assert one.dtype == other.dtype
        scale = max(1.0, float(other.abs().max()))
        same(one / scale, other / scale, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "length"), [(0, 101), (64, 37), (101, 0)], ids=["whole", "part", "padding"])
def test_rows_of_cross_entropy(dtype: torch.dtype, start: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "_MOST", 16)
    width = max(length, 3) + 5
    logits = numbers(7, width, dtype=dtype).detach() * 4
    target = torch.tensor([3, 100, -100, 64, 99, 0, 70], device=DEVICE)
    columns, terms = rows.Columns(101, start, length), rows.Terms(0.1, 0.01)
    targets = rows.Targets.of(target, columns, width, -100)
    peak, shares = rows.row_shares(logits, targets, columns, terms)
    found = cross_entropy.row_shares(logits, targets.column, targets.foreign, length)
    same(found, (peak, shares), torch.float32)
    lse = torch.logsumexp(logits.float(), 1)
    dlosses = torch.rand(7, device=DEVICE)
    expected = rows.row_gradients(logits, lse, dlosses, targets, columns, terms)
    out = torch.empty_like(expected)
    cross_entropy.row_gradients(
        logits, lse, dlosses, *targets, length, columns.size, terms.label_smoothing, terms.z_loss, out
    )
    same(out, expected, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [37, 64])
def test_norms(dtype: torch.dtype, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_PROGRAMS", 2)
    x = numbers(3, 3, columns, dtype=dtype)
    weight, bias = (numbers(columns, dtype=dtype, seed=seed) for seed in (1, 2))
    same_gradients(norms.rms_norm(x, weight, 1e-6), F.rms_norm(x, (columns,), weight, 1e-6), (x, weight), dtype)
    rounded = weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    same_gradients(norms.rms_norm(x, weight, 1e-6, rounded=True), rounded, (x, weight), dtype)
    expected = F.layer_norm(x, (columns,), weight, bias, 1e-5)
    same_gradients(norms.layer_norm(x, weight, bias, 1e-5), expected, (x, weight, bias), dtype)
    expected = F.layer_norm(x, (columns,), weight, None, 1e-5)
    same_gradients(norms.layer_norm(x, weight, None, 1e-5), expected, (x, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    gate, up = numbers(3, 5, 101, dtype=dtype), numbers(3, 5, 101, dtype=dtype, seed=1)
    same_gradients(swiglu.swiglu(gate, up), F.silu(gate) * up, (gate, up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2])
def test_rotary(dtype: torch.dtype, batch: int) -> None:
    x = numbers(2, 3, 5, 12, dtype=dtype)
    cos, sin = (numbers(batch, 5, 12, dtype=dtype, seed=seed).detach() for seed in (1, 2))
    half = torch.cat([-x[..., 6:], x[..., :6]], -1)
    same_gradients(rotary.rotary(x, cos, sin), x * cos.unsqueeze(1) + half * sin.unsqueeze(1), (x,), dtype)
