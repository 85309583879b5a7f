"""The kernel "triton" of `kernels.adam`: all pieces of a rule in one launch, and their numbers in one before it.

Where pieces lie is in a table on the device, made when they are first stepped on and again where one has moved. Triton
takes numbers of the host as fp32, in which 1 - beta2 would be off by 1e-5 and beta2^t soon by more: what the numbers
are computed from comes as a sum of two.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..adam import Piece, Rule

_BLOCK = 2048
_COLUMNS = 7  # addresses of master, grad, exp_avg, exp_avg_sq, weight and step, and the number of elements
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _whole(high, rest):
    return tl.cast(high, tl.float64) + tl.cast(rest, tl.float64)


@triton.jit
def _prepare(
    table, numbers, skip, lr_on_device, lr, lr_rest, decay, decay_rest, log1, log1_rest, log2, log2_rest,
    SKIPS: tl.constexpr, LR_ON_DEVICE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For each piece: count the step; numbers = lr / (1 - beta1^t), sqrt(1 - beta2^t), 1 - lr weight_decay"""
    piece = tl.program_id(0)
    place = tl.load(table + piece * COLUMNS + 5).to(tl.pointer_type(tl.float32))
    step = tl.load(place) + 1.0
    rate = _whole(lr, lr_rest)
    if LR_ON_DEVICE:
        rate = tl.load(lr_on_device).to(tl.float64)
    taken = step.to(tl.float64)
    bias1 = 1.0 - tl.exp(taken * _whole(log1, log1_rest))
    bias2 = 1.0 - tl.exp(taken * _whole(log2, log2_rest))
    shrunk = 1.0 - rate * _whole(decay, decay_rest)
    tl.store(numbers + piece * 3, (rate / bias1).to(tl.float32))
    tl.store(numbers + piece * 3 + 1, tl.sqrt(bias2).to(tl.float32))
    tl.store(numbers + piece * 3 + 2, shrunk.to(tl.float32))
    if SKIPS:
        step -= tl.load(skip)
    tl.store(place, step)


@triton.jit
def _update(
    table, blocks, numbers, factor, skip, rest1, beta2, rest2, eps, coupled,
    GRAD: tl.constexpr, WEIGHT: tl.constexpr, WRITES: tl.constexpr, SKIPS: tl.constexpr, COUPLED: tl.constexpr,
    MAXIMIZES: tl.constexpr, ALIGNED: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    piece = tl.load(blocks + 2 * program)
    row = table + piece * COLUMNS
    masters = tl.load(row).to(tl.pointer_type(tl.float32))
    grads = tl.load(row + 1).to(tl.pointer_type(GRAD))
    averages = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    squares = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    weights = tl.load(row + 4).to(tl.pointer_type(WEIGHT))
    if ALIGNED:
        masters, grads = tl.multiple_of(masters, 16), tl.multiple_of(grads, 16)
        averages, squares = tl.multiple_of(averages, 16), tl.multiple_of(squares, 16)
        weights = tl.multiple_of(weights, 16)
    place = tl.load(blocks + 2 * program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(row + 6)
    if SKIPS:
        count = tl.where(tl.load(skip) == 0.0, count, 0)
    if ALIGNED:
        count = tl.multiple_of(count, 8)  # so that what is read at once is inside or outside as a whole
    inside = place < count
    size, root, decay = tl.load(numbers + piece * 3), tl.load(numbers + piece * 3 + 1), tl.load(numbers + piece * 3 + 2)
    g = tl.load(grads + place, mask=inside, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    w = tl.load(masters + place, mask=inside, other=0.0)
    m = tl.load(averages + place, mask=inside, other=0.0)
    v = tl.load(squares + place, mask=inside, other=0.0)
    if MAXIMIZES:
        g = -g
    if COUPLED:
        g += coupled * w
    else:
        w *= decay
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    w -= tl.div_rn(size * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(masters + place, w, mask=inside)
    tl.store(averages + place, m, mask=inside)
    tl.store(squares + place, v, mask=inside)
    if WRITES:
        tl.store(weights + place, w.to(WEIGHT), mask=inside)


class _Table(NamedTuple):
    """
    places       addresses and sizes that the rest was made from
    table        [pieces, _COLUMNS] int64, on the device
    blocks       [programs, 2] int32: a piece and the block of it
    numbers      [pieces, 3] fp32
    is_aligned   whether all pieces begin and end where sixteen bytes can be read at once
    """

    places: list[tuple[int, ...]]
    table: Tensor
    blocks: Tensor
    numbers: Tensor
    is_aligned: bool


class TritonAdam:
    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype, torch.dtype | None], _Table] = {}

    def __call__(self, number: int, pieces: Sequence[Piece], rule: Rule, factor: Tensor, skip: Tensor | None) -> None:
        kinds: dict[tuple[torch.dtype, torch.dtype | None], list[Piece]] = {}
        for piece in pieces:
            kinds.setdefault((piece.grad.dtype, None if piece.weight is None else piece.weight.dtype), []).append(piece)
        for (grad, weight), alike in kinds.items():
            self._step(self._table((number, grad, weight), alike), grad, weight, rule, factor, skip)

    def _table(self, key: tuple[int, torch.dtype, torch.dtype | None], pieces: Sequence[Piece]) -> _Table:
        places = [_place(piece) for piece in pieces]
        found = self._tables.get(key)
        if found is None or found.places != places:
            self._tables[key] = found = _table_of(places, pieces[0].master.device)
        return found

    def _step(
        self,
        where: _Table,
        grad: torch.dtype,
        weight: torch.dtype | None,
        rule: Rule,
        factor: Tensor,
        skip: Tensor | None,
    ) -> None:
        on_device = isinstance(rule.lr, Tensor)
        _prepare[(len(where.places),)](
            where.table,
            where.numbers,
            factor if skip is None else skip,
            rule.lr if on_device else factor,
            *_in_two(0.0 if isinstance(rule.lr, Tensor) else rule.lr),
            *_in_two(rule.weight_decay if rule.decoupled else 0.0),
            *_in_two(_log(rule.beta1)),
            *_in_two(_log(rule.beta2)),
            SKIPS=skip is not None,
            LR_ON_DEVICE=on_device,
            COLUMNS=_COLUMNS,
            num_warps=1,
        )
        _update[(len(where.blocks),)](
            where.table,
            where.blocks,
            where.numbers,
            factor,
            factor if skip is None else skip,
            *map(float, (1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.weight_decay)),
            GRAD=_TYPES[grad],
            WEIGHT=_TYPES[weight or torch.float32],
            WRITES=weight is not None,
            SKIPS=skip is not None,
            COUPLED=bool(rule.weight_decay) and not rule.decoupled,
            MAXIMIZES=rule.maximize,
            ALIGNED=where.is_aligned,
            COLUMNS=_COLUMNS,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def _place(piece: Piece) -> tuple[int, ...]:
    tensors = piece.master, piece.grad, piece.exp_avg, piece.exp_avg_sq
    weight = 0 if piece.weight is None else piece.weight.data_ptr()
    return (*(tensor.data_ptr() for tensor in tensors), weight, piece.step.data_ptr(), piece.master.numel())


def _table_of(places: list[tuple[int, ...]], device: torch.device) -> _Table:
    table = torch.tensor(places, dtype=torch.int64, device="cpu")
    counts = (table[:, -1] + _BLOCK - 1) // _BLOCK
    piece = torch.repeat_interleave(torch.arange(len(places), device="cpu"), counts)
    block = torch.arange(len(piece), device="cpu") - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    blocks = torch.stack([piece, block], dim=1).to(torch.int32)
    numbers = torch.empty(len(places), 3, dtype=torch.float32, device=device)
    is_aligned = not bool((table[:, :5] % 16).any() or (table[:, -1] % 8).any())
    return _Table(places, table.to(device), blocks.to(device), numbers, is_aligned)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e4  # beta^t is 0 then


def _in_two(value: float) -> tuple[float, float]:
    """Two numbers of fp32 whose sum is `value`, to 48 bits."""
    high = c_float(value).value  # a tensor would lie on the default device, and be waited for there
    return high, float(value) - high
