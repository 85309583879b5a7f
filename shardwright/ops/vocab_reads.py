"""What scripts read off logits whose vocabulary is split over the ranks of a group: numbers of the whole vocabulary,
without gathering it.

`x` holds this rank's columns along `dim`, real ids first, then padding, which nothing here looks at. All functions are
collective. What comes back is the same on every rank, but for `log_softmax` and `softmax`, which keep the columns where
they are. Gradients flow to x, from consumers that compute the same on every rank. Half precision is computed in fp32
and returned as it came, as torch does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import all_gather
from .collective import all_reduce, copy_to_group, reduce_from_group
from .vocab_shard import VocabShard


def logsumexp(x: Tensor, shard: VocabShard, dim: int, keepdim: bool = False) -> Tensor:
    """[..., V_local, ...] -> [..., 1, ...], or without the dim."""
    real = _wide(_real(x, shard, dim))
    if shard.length:
        peak = real.detach().amax(dim, keepdim=True)
    else:
        peak = real.new_full([1 if place == dim else size for place, size in enumerate(real.shape)], -torch.inf)
    if _several(x, shard):
        peak = all_reduce(peak, shard.group, dist.ReduceOp.MAX)
    peak = peak.masked_fill(peak.isinf(), 0)  # rows of one value only, as torch has it
    total = summed((real - peak).exp().sum(dim, keepdim=True), shard)
    result = (total.log() + peak).to(x.dtype)
    return result if keepdim else result.squeeze(dim)


def log_softmax(x: Tensor, shard: VocabShard, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's columns of the whole vocabulary's; zero in those of padding, so that nothing overflows there."""
    x = x if dtype is None else x.to(dtype)
    return _padded(_log_shares(x, shard, dim), shard, dim).to(x.dtype)


def softmax(x: Tensor, shard: VocabShard, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's columns of the whole vocabulary's; zero in those of padding."""
    x = x if dtype is None else x.to(dtype)
    return _padded(_log_shares(x, shard, dim).exp(), shard, dim).to(x.dtype)


def _log_shares(x: Tensor, shard: VocabShard, dim: int) -> Tensor:
    """Of the real columns, at least fp32."""
    wide = _wide(x)
    total = logsumexp(wide, shard, dim, keepdim=True)
    return _real(wide, shard, dim) - (copy_to_group(total, shard.group) if _several(x, shard) else total)


def _padded(real: Tensor, shard: VocabShard, dim: int) -> Tensor:
    if shard.length == shard.local:
        return real
    shape = [shard.local - shard.length if place == dim else size for place, size in enumerate(real.shape)]
    return torch.cat([real, real.new_zeros(shape)], dim)


def gather(x: Tensor, shard: VocabShard, dim: int, index: Tensor) -> Tensor:
    """`whole.gather(dim, index)` with ids of the whole vocabulary, the same on every rank. Invalid ids raise on all
    of them.
    """
    foreign = (index < shard.start) | (index >= shard.start + shard.length)
    invalid = (index < 0) | (index >= shard.size)
    local = (index - shard.start).masked_fill(foreign, 0).masked_fill(invalid, shard.local)  # gather refuses these
    return summed(x.gather(dim, local).masked_fill(foreign, 0), shard)


def best(x: Tensor, shard: VocabShard, dim: int, largest: bool = True, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Largest (or smallest) value and its id; of equal ones the first."""
    ids = _candidates(x, shard, dim, 1, largest)[1]
    values = gather(x, shard, dim, ids)
    return (values, ids) if keepdim else (values.squeeze(dim), ids.squeeze(dim))


def topk(x: Tensor, shard: VocabShard, dim: int, k: int, largest: bool = True) -> tuple[Tensor, Tensor]:
    """The k largest (or smallest) values in order, and their ids."""
    if not 0 < k <= shard.size:
        raise ValueError(f"topk(k={k}) of a vocabulary of {shard.size}; k must be in 1..{shard.size}")
    ids = _candidates(x, shard, dim, k, largest)[1]
    return gather(x, shard, dim, ids), ids


def total(
    x: Tensor, shard: VocabShard, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype | None, vocab_dim: int
) -> Tensor:
    """`whole.sum(dims)`, the vocabulary's dim among them."""
    real = _real(x, shard, vocab_dim)
    if dtype is None and not real.is_floating_point():
        dtype = torch.int64  # as torch counts
    real = real.to(dtype) if dtype is not None else real
    return summed(_wide(real).sum(dims, keepdim=keepdim), shard).to(real.dtype)


def _candidates(x: Tensor, shard: VocabShard, dim: int, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Values and ids of the best k, from the best k of every rank: [..., k, ...]."""
    real = _real(x.detach(), shard, dim)
    few = min(k, shard.length)
    if k == 1 and few:
        values, ids = (torch.max if largest else torch.min)(real, dim, keepdim=True)
    else:
        values, ids = real.topk(few, dim, largest)
    ids = ids + shard.start
    if few < k:
        shape = [k - few if place == dim else size for place, size in enumerate(x.shape)]
        values = torch.cat([values, values.new_full(shape, -torch.inf if largest else torch.inf)], dim)
        ids = torch.cat([ids, ids.new_zeros(shape)], dim)
    if _several(x, shard):
        sizes = [k] * shard.group.size()
        values, ids = (all_gather(part.contiguous(), shard.group, dim, sizes) for part in (values, ids))
    if k == 1:
        chosen = (torch.argmax if largest else torch.argmin)(values, dim, keepdim=True)
    else:
        chosen = values.topk(k, dim, largest).indices
    return values.gather(dim, chosen), ids.gather(dim, chosen)


def _real(x: Tensor, shard: VocabShard, dim: int) -> Tensor:
    return x.narrow(dim, 0, shard.length)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _several(x: Any, shard: VocabShard) -> bool:
    return shard.group.size() > 1 and not x.is_meta  # without data there is nothing to reduce


def summed(x: Tensor, shard: VocabShard) -> Tensor:
    """The sum of the ranks' parts."""
    return reduce_from_group(x, shard.group) if _several(x, shard) else x
