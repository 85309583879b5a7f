"""Where the largest of numbers are taken to be that have no values: anywhere, by lot. So a router's experts are all
chosen about as often.

The same lot for as many numbers at every time, so that layers that are alike stay so.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_MOST = 2**22  # numbers that are drawn; further rows repeat them


def largest(numbers: torch.Size, dim: int | None, shape: torch.Size) -> torch.Tensor:
    """Places along `dim` of what has the size `numbers`, of all in a row for None; of the given shape, in which `dim`
    may be missing. Distinct along `dim`.
    """
    among = numbers.numel() if dim is None else numbers[dim] if numbers else 1
    kept = dim is not None and len(shape) == len(numbers) and len(shape) > 0
    count = shape[dim] if kept and dim is not None else 1
    rows = shape.numel() // max(count, 1)
    drawn = min(rows, max(_MOST // max(among, 1), 1))
    places = _drawn(drawn, among, count)[torch.arange(rows) % max(drawn, 1)]
    if not kept or dim is None:
        return places.reshape(shape)
    others = [size for place, size in enumerate(shape) if place != dim % len(shape)]
    return places.reshape(*others, count).movedim(-1, dim).contiguous()


@lru_cache(maxsize=64)
def _drawn(rows: int, among: int, count: int) -> torch.Tensor:
    """[rows, count]"""
    some = min(among, max(_MOST, count))  # evenly apart, of more than can be drawn
    lots = torch.rand(rows, some, generator=torch.Generator().manual_seed(0))
    return lots.topk(count).indices * (among // max(some, 1))
