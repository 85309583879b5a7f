"""Floating-point tensors in 8 bits per element, for the wire alone: a format in blocks, in plain torch.

32 elements in a row share a scale, a power of two, which travels as its exponent in one byte; each element is a
float8_e4m3fn of the value over the scale. n elements take n + ceil(n / 32) bytes: 0.52 of 16 bits, 0.26 of 32.

    payload   [codes of n elements, exponents of ceil(n / 32) blocks]      uint8, which every backend carries

What comes back differs from what was sent, element by element, by at most

    |x' - x| <= max(2^-4 |x|, 2^-17 m, 2^-136)       m: largest finite magnitude of the block

and the rounding of its dtype, where it is among the smallest numbers of that. Zeros, infinities and nan come back as
they are, and so does what has been through the format before: rounding twice is rounding once. The numbers behind the
bound: e4m3 has 3 bits of mantissa, so 2^-4 of an element; the scale brings m to (128, 256], and the smallest step of
e4m3 is 2^-9, so half a step is 2^-10 / 128 of m. The codes above 256 are free: the largest one says infinity.

[Note: e4m3 for gradients too]
e5m2 has a wider range and half the precision. Under a scale per block of 32, e4m3 covers 2^-17 of the largest of them,
which gradients' neighbours seldom exceed: measured on gradients of small Llamas the error of e5m2 is 2.0 times as large
(`tests/unit/test_quantised.py` repeats that).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
RELATIVE = 2.0**-4  # error of an element over the element
OF_LARGEST = 2.0**-17  # error of an element over the largest one of its block, where that is more
_CODES = torch.float8_e4m3fn
_INFINITE = 448.0  # the largest number of the codes, which no finite element gets
_LOWEST, _HIGHEST = -126, 120  # exponents of scales: they and their inverses are normal numbers in fp32
_BIAS = 127
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def can_be_quantised(dtype: torch.dtype) -> bool:
    """Floats of 16 and 32 bits. Who computes in 64 wants them; integers and bools are exact or nothing."""
    return dtype in _DTYPES


def wire_bytes(numel: int) -> int:
    """Of a payload of so many elements."""
    return numel + -(-numel // BLOCK)


BYTES_PER_ELEMENT = wire_bytes(BLOCK) / BLOCK


@torch.no_grad()
def quantise(x: Tensor) -> Tensor:
    """The payload of every row: [..., n] -> uint8 [..., wire_bytes(n)]."""
    numel = x.shape[-1]
    lines = x.shape[:-1].numel()
    values = x.reshape(lines, numel).float()
    blocks = -(-numel // BLOCK)
    if blocks * BLOCK != numel:
        values = torch.nn.functional.pad(values, (0, blocks * BLOCK - numel))
    values = values.view(lines, blocks, BLOCK)
    sizes = values.abs()
    largest = torch.where(sizes < torch.inf, sizes, 0).amax(-1, keepdim=True)
    mantissas, exponents = torch.frexp(largest)
    # the largest comes to (128, 256], which rounding does not leave upwards: see "rounding twice" above
    exponents = (exponents - 8 - (mantissas == 0.5).int()).clamp_(_LOWEST, _HIGHEST)
    codes = (values * power_of_two(-exponents)).clamp_(-_INFINITE, _INFINITE).to(_CODES).view(torch.uint8)
    parts = [codes.view(lines, blocks * BLOCK)[:, :numel], (exponents + _BIAS).to(torch.uint8).view(lines, blocks)]
    return torch.cat(parts, 1).view(*x.shape[:-1], wire_bytes(numel))


@torch.no_grad()
def dequantise(payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `quantise` has packed: uint8 [..., wire_bytes(numel)] -> [..., numel], rounded to `dtype`."""
    lines, blocks = payload.shape[:-1].numel(), -(-numel // BLOCK)
    rows = payload.reshape(lines, wire_bytes(numel))
    codes = rows[:, :numel]
    if blocks * BLOCK != numel:
        codes = torch.nn.functional.pad(codes, (0, blocks * BLOCK - numel))
    values = codes.contiguous().view(_CODES).float().view(lines, blocks, BLOCK)
    scales = power_of_two(rows[:, numel:].int() - _BIAS).unsqueeze(-1)
    most = torch.finfo(dtype).max
    infinite = values.abs() == _INFINITE
    found = torch.where(infinite, values * torch.inf, (values * scales).clamp_(-most, most))
    return found.view(lines, blocks * BLOCK)[:, :numel].to(dtype).contiguous().view(*payload.shape[:-1], numel)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents in fp32, by their bits; integers in [-126, 127]."""
    return ((exponents.int() + _BIAS) << 23).view(torch.float32)
