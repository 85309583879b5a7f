"""Dropout of attention whose numbers depend on coordinates alone: the same for one query and one key wherever and
whenever their score is computed, in blocks of any size, forward or backward.

    kept[b, h, q, k] = 0 where hash(seed, b, h, q, k) < p, else 1 / (1 - p)

The seed comes from the global generator, once per call, so that recomputation draws it again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_SEEDS = (1 << 63) - 1
_BITS = 32
_ROWS, _KEYS = 0x1E3779B97F4A7C15, 0x3C6EF372FE94F82B  # odd, they spread neighbours over all bits
_FIRST, _SECOND = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85


class Dropout(NamedTuple):
    """Of the weights of a block.

    p           the share that is dropped
    queries     positions in the whole sequence, [Q]
    keys        [K]
    """

    p: float
    seed: int
    queries: Tensor
    keys: Tensor

    def kept(self, like: Tensor) -> Tensor:
        """What the weights `like` [B, H, Q, K] are multiplied by; their values do not matter."""
        if self.p >= 1:
            return torch.zeros_like(like)
        samples, heads = like.shape[:2]
        device = like.device
        rows = torch.arange(samples * heads, device=device).view(samples, heads, 1, 1)
        rows = _mixed(_mixed(rows * _ROWS + self.seed) + self.queries.to(device)[:, None] * _ROWS)
        numbers = _mixed(rows + self.keys.to(device) * _KEYS)
        numbers &= (1 << _BITS) - 1
        return (numbers >= round(self.p * (1 << _BITS))).to(like.dtype).div_(1 - self.p)


def draw_seed() -> int:
    return int(torch.randint(_SEEDS, ()))


def _mixed(numbers: Tensor) -> Tensor:
    """A hash of each number, int64, in place of `numbers`."""
    for factor in (_FIRST, _SECOND):
        numbers ^= numbers >> 32
        numbers *= factor
    numbers ^= numbers >> 29
    return numbers
