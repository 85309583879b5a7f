"""The 8-bit format of the wire: its bound, what it keeps exactly, its size, and why it has one kind of codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.comm.quantised import (
    BLOCK,
    BYTES_PER_ELEMENT,
    OF_LARGEST,
    RELATIVE,
    can_be_quantised,
    dequantise,
    quantise,
    wire_bytes,
)
from shardwright.testing import zoo

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rounded(x: Tensor) -> Tensor:
    return dequantise(quantise(x), x.shape[-1], x.dtype)


def largest_of_block(x: Tensor) -> Tensor:
    """[..., n] -> [..., n]"""
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    return padded.amax(-1, keepdim=True).expand(padded.shape).flatten(-2)[..., : x.shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 1000])
def test_every_element_is_within_the_bound(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(numel)
    spread = torch.randn(3, 1, numel).mul(3).exp() * torch.tensor([1e-4, 1.0, 50.0]).view(3, 1, 1)
    x = (torch.randn(3, 2, numel) * spread).clamp(-6e4, 6e4).to(dtype)
    payload = quantise(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (3, 2, wire_bytes(numel))
    y = rounded(x)
    assert y.dtype == dtype
    exact = x.double()
    error = torch.maximum(RELATIVE * exact.abs(), OF_LARGEST * largest_of_block(exact))
    floor = 2.0**-25 if dtype == torch.float16 else 0.0  # half the smallest number of the dtype
    assert ((y.double() - exact).abs() <= error + floor).all()
    if dtype != torch.float16 or numel == 0:
        assert torch.equal(rounded(y), y), "rounding twice is rounding once"


def test_numbers_at_the_edges_of_the_dtypes() -> None:
    for dtype in DTYPES:
        kind = torch.finfo(dtype)
        x = torch.tensor([kind.max, kind.min, 0.0, torch.inf, -torch.inf, torch.nan], dtype=dtype)
        y = rounded(x)
        assert torch.equal(y[:5].isinf(), x[:5].isinf()), "finite stays finite, infinite infinite"
        assert torch.equal(y[3:5], x[3:5])
        assert y[5].isnan()
        assert y[0] == -y[1] >= kind.max * (1 - RELATIVE)
        assert y[2] == 0
    tiny = torch.tensor([1e-45, 1e-38, -1e-40])
    assert ((rounded(tiny) - tiny).abs() <= (RELATIVE * tiny.abs()).clamp_min(2.0**-136)).all()
    zeros = torch.zeros(40)
    assert torch.equal(rounded(zeros), zeros)
    beside = torch.tensor([1.0, torch.inf, 3.0, torch.nan])
    assert torch.equal(rounded(beside)[[0, 2]], beside[[0, 2]]), "what is beside an infinity is not touched"


def test_sizes() -> None:
    assert [wire_bytes(numel) for numel in (0, 1, 32, 33)] == [0, 2, 33, 35]
    assert pytest.approx(0.516, abs=1e-3) == BYTES_PER_ELEMENT / 2
    assert [can_be_quantised(dtype) for dtype in (*DTYPES, torch.float64, torch.int32)] == [True] * 3 + [False] * 2


def test_gradients_lose_less_in_e4m3_than_in_e5m2() -> None:
    model = zoo.build("llama-causal-lm", dtype=torch.float32, num_hidden_layers=2)
    model(**zoo.inputs("llama-causal-lm", batch_size=8, seq_len=32)).loss.backward()
    gradients = torch.cat([param.grad.view(-1) for param in model.parameters() if param.grad is not None])
    blocks = gradients[: gradients.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    scale = 2.0 ** torch.floor(torch.log2(2.0**15 / blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)))
    wide = (blocks * scale).to(torch.float8_e5m2).float() / scale
    ratio = (wide - blocks).norm() / (rounded(blocks) - blocks).norm()
    assert 1.8 < ratio < 2.2
