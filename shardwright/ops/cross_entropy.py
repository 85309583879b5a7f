"""Cross entropy on logits whose vocabulary is split over the ranks of a group; the full logits never exist.

Shapes: logits [N, V_local], the columns of `VocabShard` (real ids first, then padding); target [N], the same on every
rank. The formulas are those of `kernels.cross_entropy_rows`.

Forward takes two collectives of [N] and [3, N] numbers, backward takes none. Half precision is computed in fp32, fp64
stays fp64. What is saved for backward are the logits as they came and lse [N], not a copy in fp32.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..kernels.cross_entropy_rows import (
    Columns,
    Targets,
    Terms,
    joined,
    promoted,
    row_gradients,
    row_losses,
    row_shares,
)
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
        columns, terms = Columns.of(shard), Terms(label_smoothing, z_loss)
        targets = Targets.of(target, columns, shard.local, ignore_index)
        lse, shares = joined(*row_shares(logits, targets, columns, terms), columns)
        ctx.save_for_backward(logits, lse, *targets)
        ctx.shard, ctx.columns, ctx.terms = shard, columns, terms
        return row_losses(lse, shares, targets, columns, terms)

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        logits, lse, *saved = ctx.saved_tensors
        targets = Targets(*saved)
        if torch.is_grad_enabled():  # gradients of gradients: through the formula written out
            losses = written_out(logits, targets, ctx.shard, ctx.terms)
            (dx,) = torch.autograd.grad(losses, logits, dlosses, create_graph=True)
        else:
            dx = row_gradients(logits, lse, dlosses, targets, ctx.columns, ctx.terms).to(logits.dtype)
        return dx, None, None, None, None, None


def written_out(logits: Tensor, targets: Targets, shard: VocabShard, terms: Terms) -> Tensor:
    """The losses, of operations that autograd knows."""
    smoothing, z_loss = terms
    real = promoted(logits[:, : shard.length])
    x_target = promoted(logits.gather(1, targets.column.unsqueeze(1)).squeeze(1)).masked_fill(targets.foreign, 0)
    x_target, x_sum = reduce_from_group(torch.stack([x_target, real.sum(1)]), shard.group)
    lse = logsumexp(promoted(logits), shard, 1)
    losses = (1 - smoothing) * (lse - x_target) + smoothing * (lse - x_sum / shard.size) + z_loss * lse.square()
    return losses.masked_fill(targets.ignored, 0)
