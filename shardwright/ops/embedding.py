"""Embedding lookup in a vocabulary that is split over the ranks of a group."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .collective import reduce_from_group
from .vocab_shard import VocabShard


def vocab_embedding(
    ids: Tensor, weight: Tensor, shard: VocabShard, padding_idx: int | None = None, *, reduce: bool = True
) -> Tensor:
    """Look up replicated ids; every rank contributes the rows that it holds.

    ids [...], weight [V_local, H] -> [..., H]

    forward   y = sum over ranks of (weight[id - start] where this rank holds the id, else 0)
    wgrad     dweight[id - start] += dy where this rank holds the id; nothing for `padding_idx`, as in torch

    `reduce=False` returns this rank's contribution, for callers that reduce-scatter it along the sequence. Ids outside
    the vocabulary raise on all ranks alike.
    """
    if shard.group.size() == 1:
        return F.embedding(ids, weight, padding_idx)
    foreign = (ids < shard.start) | (ids >= shard.start + shard.length)
    invalid = (ids < 0) | (ids >= shard.size)
    # the lookup refuses invalid ids
    local_ids = (ids - shard.start).masked_fill(foreign, 0).masked_fill(invalid, weight.shape[0])
    local_padding = None
    if padding_idx is not None:
        padding_idx = padding_idx % shard.size  # torch allows negative ones
        if shard.start <= padding_idx < shard.start + shard.length:
            local_padding = padding_idx - shard.start
    y = F.embedding(local_ids, weight, local_padding).masked_fill(foreign.unsqueeze(-1), 0)
    return reduce_from_group(y, shard.group) if reduce else y
