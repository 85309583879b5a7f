"""Cross entropy on logits of which every rank holds a part of the vocabulary."""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...ops.cross_entropy import Reduction, vocab_cross_entropy
from ...ops.vocab_mode import vocab_parallel_loss, vocab_shard_of
from ...ops.vocab_shard import VocabShard
from .parallel_module import group_or_all


def cross_entropy_1d(
    vocab_logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    mode: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` of the whole vocabulary from every rank's equal share of the logits.

    vocab_logits [..., V/n], labels [...] -> [], or [...] with mode "none"

    vocab_size  number of real entries when the shares hold padding; None takes it from the logits of a sharded head,
                which know it, and otherwise the sum of the shares
    """
    local = vocab_logits.shape[-1]
    known = vocab_shard_of(vocab_logits)
    if known is not None:
        if vocab_size not in (None, known.size):
            raise ValueError(
                f"vocab_size={vocab_size}, but the logits are those of a head over {known.size} entries; leave it out"
            )
        with vocab_parallel_loss(marked=True):
            flat, targets = vocab_logits.reshape(-1, local), labels.reshape(-1)
            loss = F.cross_entropy(
                flat, targets, ignore_index=ignore_index, reduction=mode, label_smoothing=label_smoothing
            )
        return loss.view(labels.shape) if mode == "none" else loss
    group = group_or_all(process_group)
    size = vocab_size if vocab_size is not None else local * group.size()
    if not 0 < size <= local * group.size():
        raise ValueError(
            f"vocab_size={size} does not fit {group.size()} shares of {local} logits; it must be in "
            f"1..{local * group.size()}"
        )
    start = min(group.rank() * local, size)
    shard = VocabShard(group, size, start, min(local, size - start), local)
    flat = vocab_logits.reshape(-1, local)
    loss = vocab_cross_entropy(
        flat, labels.reshape(-1), shard, ignore_index=ignore_index, reduction=mode, label_smoothing=label_smoothing
    )
    return loss.view(labels.shape) if mode == "none" else loss
