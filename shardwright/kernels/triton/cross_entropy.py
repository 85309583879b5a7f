"""`kernels.cross_entropy_rows` as kernels: a program per row, which goes over its columns in blocks.

The loss reads the logits once (largest, sum of exponentials, target and sum together, where torch makes a pass for
each), the gradient reads and writes them once, in place where dtypes allow. Terms of the loss are constants of the
kernel, because numbers that are handed to it are fp32.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MOST = 8192  # columns of a block


def _block(columns: int) -> int:
    return min(_MOST, triton.next_power_of_2(max(columns, 16)))


@triton.jit
def _shares(
    logits, stride, column, foreign, peak, shares, tokens, length, width, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    most = tl.full((), -float("inf"), WIDE)
    total = tl.zeros((), WIDE)
    plain = tl.zeros((), WIDE)
    for first in range(0, length, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < length
        x = tl.load(start + place, mask=inside, other=-float("inf")).to(WIDE)
        above = tl.maximum(most, tl.max(x, 0))
        base = tl.where(above == -float("inf"), 0.0, above)
        total = total * tl.exp(most - base) + tl.sum(tl.exp(x - base), 0)
        plain += tl.sum(tl.where(inside, x, 0.0), 0)
        most = above
    place = tl.load(column + row)
    target = tl.load(start + place, mask=place < width, other=float("nan")).to(WIDE)  # what is no id has no loss
    tl.store(peak + row, most)
    tl.store(shares + row, total)
    tl.store(shares + tokens + row, tl.where((tl.load(foreign + row) != 0) & (place < width), 0.0, target))
    tl.store(shares + 2 * tokens + row, plain)


@triton.jit
def _gradients(
    logits, stride, out, out_stride, lse, dlosses, column, foreign, ignored, length, width, size,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    given = logits + row.to(tl.int64) * stride
    taken = out + row.to(tl.int64) * out_stride
    is_ignored = tl.load(ignored + row) != 0
    dloss = tl.where(is_ignored, 0.0, tl.load(dlosses + row).to(WIDE))
    total = tl.load(lse + row)
    slope = dloss * (1.0 + 2.0 * Z_LOSS * total)
    own = tl.where(tl.load(foreign + row) != 0, -1, tl.load(column + row))
    for first in range(0, width, BLOCK):
        place = first + tl.arange(0, BLOCK)
        x = tl.load(given + place, mask=place < length, other=0.0).to(WIDE)
        dx = (
            tl.exp(x - total) * slope
            - dloss * SMOOTHING / size  # from the left, in the dtype of the loss
            - tl.where(place == own, dloss * (1.0 - SMOOTHING), 0.0)
        )
        dx = tl.where((place < length) & (is_ignored == 0), dx, 0.0)
        tl.store(taken + place, dx.to(out.dtype.element_ty), mask=place < width)


def row_shares(logits: Tensor, column: Tensor, foreign: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """See `cross_entropy_rows.row_shares`; the sum of logits is always there. Targets are ids."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    tokens = logits.shape[0]
    peak, shares = logits.new_empty(tokens, dtype=wide), logits.new_empty((3, tokens), dtype=wide)
    if tokens:
        _shares[(tokens,)](
            logits, logits.stride(0), column, foreign, peak, shares, tokens, length, logits.shape[1],
            BLOCK=_block(length), WIDE=_wide(wide), num_warps=8,
        )  # fmt: skip
    return peak, shares


def row_gradients(
    logits: Tensor,
    lse: Tensor,
    dlosses: Tensor,
    column: Tensor,
    foreign: Tensor,
    ignored: Tensor,
    length: int,
    size: int,
    label_smoothing: float,
    z_loss: float,
    out: Tensor,
) -> Tensor:
    """See `cross_entropy_rows.row_gradients`; `out` may be the logits."""
    if logits.shape[0]:
        _gradients[(logits.shape[0],)](
            logits, logits.stride(0), out, out.stride(0), lse, dlosses.contiguous(), column, foreign, ignored, length,
            logits.shape[1], size, SMOOTHING=label_smoothing, Z_LOSS=z_loss, BLOCK=_block(logits.shape[1]),
            WIDE=_wide(lse.dtype), num_warps=8,
        )  # fmt: skip
    return out


def _wide(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32
