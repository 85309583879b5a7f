"""Where the tests of this folder run.

    python -m pytest -m gpu tests/gpu                                  on a GPU
    SHARDWRIGHT_GPU_REHEARSAL=1 python -m pytest -m gpu tests/gpu      on the CPU, at small sizes: the same code

A rehearsal shows that the tests themselves are right; what they are for shows on a GPU alone.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

REHEARSED = os.environ.get("SHARDWRIGHT_GPU_REHEARSAL") == "1"
DEVICE = "cpu" if REHEARSED else "cuda"
ONE_RANK = "gloo" if REHEARSED else "cpu:gloo,cuda:nccl"  # backend of a job of one rank
NAMES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Norm of the error over the norm of what is right: one rounding of the result and of what enters sums.
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ALL, HALF = tuple(CLOSE), (torch.bfloat16, torch.float16)


def size(real: T, small: T) -> T:
    """What fills a GPU, or what a CPU does in no time."""
    return small if REHEARSED else real


def draw(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    """The same numbers on every device, and no zeros among them."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return numbers.to(dtype).to(DEVICE)


def exact(tensor: Tensor) -> Tensor:
    """The same numbers for the reference, which computes on the CPU in fp64."""
    return tensor.detach().to("cpu", torch.float64).requires_grad_(tensor.requires_grad)


def off(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; nan counts as infinite."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} and {tuple(expected.shape)}"
    found, expected = found.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    error = float((found - expected).norm() / expected.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def same(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    error = off(found, expected)
    assert error <= tolerance, f"{what}: {error:.2e} off, and {tolerance:.0e} is allowed"
