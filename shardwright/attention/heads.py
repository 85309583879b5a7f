"""How attention heads are dealt to the ranks that trade sequences for heads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..comm.collectives import even_sizes


class HeadShares(NamedTuple):
    """Of all ranks, in their order.

    queries     number of query heads
    keys        heads of keys and values by index; a head that several ranks need is in several lists
    groups      query heads per key head
    """

    queries: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]

    @property
    def key_order(self) -> list[int] | None:
        """Heads of keys and values as they are sent; None: as they lie."""
        order = [head for heads in self.keys for head in heads]
        return None if order == list(range(len(order))) else order

    @property
    def key_sizes(self) -> list[int]:
        return [len(heads) for heads in self.keys]


def share_heads(num_queries: int, num_keys: int, ranks: int) -> HeadShares:
    """Computed once, but in each graph: torch.compile looks behind caches, and warns of it."""
    shared = _share_heads if torch.compiler.is_compiling() else _known_shares
    return shared(num_queries, num_keys, ranks)


def _share_heads(num_queries: int, num_keys: int, ranks: int) -> HeadShares:
    """Query heads as evenly as can be, and with them the heads of keys that they look at: each once where all serve
    equally many of a rank's query heads, else one for every query head.
    """
    per_key = num_queries // num_keys
    queries = even_sizes(num_queries, ranks)
    keys, groups = [], []
    for rank, count in enumerate(queries):
        first = sum(queries[:rank])
        looked_at = [head // per_key for head in range(first, first + count)]
        unique = list(dict.fromkeys(looked_at))
        served = {looked_at.count(head) for head in unique}
        compact = len(served) == 1
        keys.append(tuple(unique if compact else looked_at))
        groups.append(served.pop() if compact else 1)
    return HeadShares(tuple(queries), tuple(keys), tuple(groups))


_known_shares = lru_cache(maxsize=64)(_share_heads)
