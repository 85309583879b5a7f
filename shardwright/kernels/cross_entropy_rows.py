"""Cross entropy row by row, of logits whose columns may be split over ranks.

Shapes: logits [N, v], this rank's columns of V in all, real ones first, then padding; target [N], the same on every
rank.

    Z = sum_j exp(x_j)    over all ranks' real columns        lse = log Z
    nll    = lse - x_target
    smooth = lse - mean_j x_j
    loss   = (1 - eps) nll + eps smooth + z lse^2             0 where target is ignored

    dx_j   = dloss ((1 + 2 z lse) exp(x_j - lse) - (1 - eps) [j = target] - eps / V)

Half precision is computed in fp32, fp64 stays fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import turns
from ..ops.vocab_shard import VocabShard
from .backends import stands_for_gpu, triton_kernels


class Columns(NamedTuple):
    """Which columns of the logits a rank holds: `length` of `size`, from `start` on; `group` shares them, None: nobody
    does.
    """

    size: int
    start: int
    length: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, shard: VocabShard) -> Columns:
        return cls(shard.size, shard.start, shard.length, shard.group if shard.group.size() > 1 else None)


class Terms(NamedTuple):
    """Of the loss, beside the likelihood: eps and z above."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Targets(NamedTuple):
    """[N] each.

    column   of the target among this rank's; 0 where it is foreign
    foreign  where this rank holds no column of it, or it is ignored
    ignored  where there is no loss
    """

    column: Tensor
    foreign: Tensor
    ignored: Tensor

    @classmethod
    def of(cls, target: Tensor, columns: Columns, width: int, ignore_index: int) -> Targets:
        """`width` is v: what is no id at all gets that column, which gather() refuses, as torch does."""
        ignored = target == ignore_index
        foreign = (target < columns.start) | (target >= columns.start + columns.length) | ignored
        invalid = ((target < 0) | (target >= columns.size)) & ~ignored
        return cls((target - columns.start).masked_fill(foreign, 0).masked_fill(invalid, width), foreign, ignored)

    def part(self, start: int, stop: int) -> Targets:
        return Targets(self.column[start:stop], self.foreign[start:stop], self.ignored[start:stop])


def promoted(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def row_shares(logits: Tensor, targets: Targets, columns: Columns, terms: Terms) -> tuple[Tensor, Tensor]:
    """This rank's share of every row: its largest logit [N], and [3, N] of sum exp(x - largest), x_target, sum x."""
    kernels = triton_kernels("cross_entropy", logits) if logits.stride(1) == 1 else None
    if kernels is not None:
        return kernels.row_shares(logits, targets.column, targets.foreign, columns.length)  # type: ignore[no-any-return]
    if stands_for_gpu(logits):
        peak = promoted(logits.amax(1))
        return peak, peak.new_empty((3, *peak.shape))
    real = promoted(logits[:, : columns.length])
    peak = real.amax(1) if columns.length else real.new_full(targets.column.shape, -torch.inf)
    shares = real.new_zeros((3, *targets.column.shape))
    base = peak.masked_fill(peak == -torch.inf, 0)  # other ranks may have more
    shares[0] = (real - base.unsqueeze(1)).exp_().sum(1)
    shares[1] = promoted(logits.gather(1, targets.column.unsqueeze(1)).squeeze(1)).masked_fill(targets.foreign, 0)
    if terms.label_smoothing:
        shares[2] = real.sum(1)
    return peak, shares


def joined(peak: Tensor, shares: Tensor, columns: Columns) -> tuple[Tensor, Tensor]:
    """(lse [N], [3, N] summed over the ranks): two collectives of as many numbers."""
    if columns.group is not None and not peak.is_meta:  # without data there is nothing to reduce
        own = peak
        peak = own.clone()
        turns.run(dist.all_reduce, peak, op=dist.ReduceOp.MAX, group=columns.group)
        shares[0] *= (own - peak).exp_()
        turns.run(dist.all_reduce, shares, group=columns.group)
    return shares[0].log().add_(peak), shares


def row_losses(lse: Tensor, shares: Tensor, targets: Targets, columns: Columns, terms: Terms) -> Tensor:
    """[N]; 0 where the target is ignored."""
    smoothing, z_loss = terms
    losses = (1 - smoothing) * (lse - shares[1])
    if smoothing:
        losses += smoothing * (lse - shares[2] / columns.size)
    if z_loss:
        losses += z_loss * lse.square()
    return losses.masked_fill_(targets.ignored, 0)


def row_gradients(
    logits: Tensor,
    lse: Tensor,
    dlosses: Tensor,
    targets: Targets,
    columns: Columns,
    terms: Terms,
    reuse: bool = False,
    narrow: bool = False,
) -> Tensor:
    """dx [N, v] for dlosses [N], in the dtype of lse; in the memory of the logits with `reuse`, where that can be, also
    rounded to their dtype where that is `narrow`er and a kernel does it as it writes.
    """
    smoothing, z_loss = terms
    kernels = triton_kernels("cross_entropy", logits) if logits.stride(1) == 1 else None
    planned = stands_for_gpu(logits)
    fits = logits.dtype == lse.dtype or (narrow and (planned or kernels is not None))
    dx = logits if reuse and fits else torch.empty_like(logits, dtype=lse.dtype)
    if kernels is not None:
        return kernels.row_gradients(logits, lse, dlosses, *targets, columns.length, columns.size, *terms, dx)  # type: ignore[no-any-return]
    if planned:
        return torch.sub(logits, lse.unsqueeze(1), out=dx)
    dlosses = dlosses.masked_fill(targets.ignored, 0)
    slope = dlosses if not z_loss else dlosses * (1 + 2 * z_loss * lse)
    real = dx[:, : columns.length]
    torch.sub(logits[:, : columns.length], lse.unsqueeze(1), out=real)
    real.exp_().mul_(slope.unsqueeze(1))
    if smoothing:
        real -= (dlosses * (smoothing / columns.size)).unsqueeze(1)
    dx[:, columns.length :] = 0
    hard = (dlosses * (smoothing - 1)).masked_fill(targets.foreign, 0)
    dx.scatter_add_(1, targets.column.unsqueeze(1), hard.unsqueeze(1))
    return dx.masked_fill_(targets.ignored.unsqueeze(1), 0)  # not 0 * inf
