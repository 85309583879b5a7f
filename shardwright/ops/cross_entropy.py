"""Cross entropy on logits whose vocabulary is split over the ranks of a group; the full logits never exist.

Shapes: logits [N, V_local], the columns of `VocabShard` (real ids first, then padding); target [N], the same on every
rank.

    Z = sum_j exp(x_j)    over all ranks' real columns        lse = log Z
    nll    = lse - x_target
    smooth = lse - mean_j x_j
    loss   = (1 - eps) nll + eps smooth + z lse^2             0 where target is ignored

    dx_j   = dloss ((1 + 2 z lse) exp(x_j - lse) - (1 - eps) [j = target] - eps / V)

Forward takes two collectives of [N] and [3, N] numbers, backward takes none. Half precision is computed in fp32, fp64
stays fp64. What is saved for backward are the logits as they came and lse [N], not a copy in fp32.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import turns
from .collective import reduce_from_group
from .vocab_reads import logsumexp
from .vocab_shard import VocabShard

Reduction = Literal["mean", "sum", "none"]


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    shard: VocabShard,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """`F.cross_entropy(full_logits, target, ...)` plus `z_loss * lse^2` per token, from this rank's columns of the
    logits.

    logits [N, V_local], target [N] -> [] or, with reduction "none", [N]; at least fp32.
    "mean" divides by the number of targets that are not ignored; without any it is nan, as in torch.
    """
    if logits.ndim != 2 or target.shape != logits.shape[:1] or logits.shape[1] != shard.local:
        raise ValueError(
            f"vocab_cross_entropy: logits {tuple(logits.shape)} and target {tuple(target.shape)} must be [N, "
            f"{shard.local}] and [N]; flatten leading dims first, class probabilities as target need gathered logits "
            "(gather_output=True)"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"vocab_cross_entropy: reduction={reduction!r} must be 'mean', 'sum' or 'none'")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"vocab_cross_entropy: label_smoothing={label_smoothing} must be between 0 and 1")
    losses = _VocabCrossEntropy.apply(logits, target, shard, ignore_index, label_smoothing, z_loss)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        shard: VocabShard,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        ignored = target == ignore_index
        foreign = (target < shard.start) | (target >= shard.start + shard.length) | ignored
        invalid = ((target < 0) | (target >= shard.size)) & ~ignored
        # gather() refuses invalid targets, as torch does; foreign ones read a column that is then masked out.
        local_target = (target - shard.start).masked_fill(foreign, 0).masked_fill(invalid, shard.local)

        real = _promoted(logits[:, : shard.length])
        peak = real.amax(1) if shard.length else real.new_full(target.shape, -torch.inf)
        several = shard.group.size() > 1 and not logits.is_meta  # without data there is nothing to reduce
        if several:
            turns.run(dist.all_reduce, peak, op=dist.ReduceOp.MAX, group=shard.group)
        shares = real.new_zeros((3, *target.shape))  # of Z, of x_target, of the sum of x
        shares[0] = (real - peak.unsqueeze(1)).exp_().sum(1)
        shares[1] = _promoted(logits.gather(1, local_target.unsqueeze(1)).squeeze(1)).masked_fill(foreign, 0)
        if label_smoothing:
            shares[2] = real.sum(1)
        if several:
            turns.run(dist.all_reduce, shares, group=shard.group)
        total, x_target, x_sum = shares
        lse = total.log_().add_(peak)
        losses = (1 - label_smoothing) * (lse - x_target)
        if label_smoothing:
            losses += label_smoothing * (lse - x_sum / shard.size)
        if z_loss:
            losses += z_loss * lse.square()
        ctx.save_for_backward(logits, lse, local_target, foreign, ignored)
        ctx.shard, ctx.label_smoothing, ctx.z_loss = shard, label_smoothing, z_loss
        return losses.masked_fill_(ignored, 0)

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, local_target, foreign, ignored = ctx.saved_tensors
        shard, label_smoothing, z_loss = ctx.shard, ctx.label_smoothing, ctx.z_loss
        if torch.is_grad_enabled():  # gradients of gradients: through the formula written out
            losses = _written_out(logits, local_target, foreign, ignored, shard, label_smoothing, z_loss)
            (dx,) = torch.autograd.grad(losses, logits, dlosses, create_graph=True)
            return dx, None, None, None, None, None
        dlosses = dlosses.masked_fill(ignored, 0)
        slope = dlosses if not z_loss else dlosses * (1 + 2 * z_loss * lse)
        dx = torch.empty_like(logits, dtype=lse.dtype)
        real = dx[:, : shard.length]
        torch.sub(logits[:, : shard.length], lse.unsqueeze(1), out=real)
        real.exp_().mul_(slope.unsqueeze(1))
        if label_smoothing:
            real -= (dlosses * (label_smoothing / shard.size)).unsqueeze(1)
        dx[:, shard.length :] = 0
        dx.scatter_add_(
            1, local_target.unsqueeze(1), (dlosses * (label_smoothing - 1)).masked_fill(foreign, 0).unsqueeze(1)
        )
        dx.masked_fill_(ignored.unsqueeze(1), 0)  # not 0 * inf
        return dx.to(logits.dtype), None, None, None, None, None


def _written_out(
    logits: Tensor,
    local_target: Tensor,
    foreign: Tensor,
    ignored: Tensor,
    shard: VocabShard,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """The losses, of operations that autograd knows."""
    real = _promoted(logits[:, : shard.length])
    x_target = _promoted(logits.gather(1, local_target.unsqueeze(1)).squeeze(1)).masked_fill(foreign, 0)
    x_target, x_sum = reduce_from_group(torch.stack([x_target, real.sum(1)]), shard.group)
    lse = logsumexp(_promoted(logits), shard, 1)
    losses = (
        (1 - label_smoothing) * (lse - x_target) + label_smoothing * (lse - x_sum / shard.size) + z_loss * lse.square()
    )
    return losses.masked_fill(ignored, 0)


def _promoted(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
