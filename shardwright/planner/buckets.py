"""Whether the buckets in which gradients are reduced come again with every layer, so that more layers have more buckets
of the same sizes.

    H L | L E         buckets of a head, layers and an embedding, |: where one ends
    H L | L | L E     with a layer more: there is one bucket more, and there is one for every further layer

Where layers are small beside a bucket, a layer more makes some buckets larger and moves where others end, which says
nothing about ten layers more: neither the largest bucket, which says how large the room for what is on its way is, nor
the gradients that wait until theirs is full. Buckets without room of their own (`capacity`) do not matter: gradients
are reduced where they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

_Filled = tuple[int, ...]  # elements of a bucket's parameters, one after the other


class Buckets(NamedTuple):
    """Of a rank.

    capacity   bytes of the room for one on its way
    by_family  those whose gradients take the same way, in the order in which a backward fills them
    """

    capacity: int
    by_family: dict[Hashable, list[_Filled]]

    @classmethod
    def of(cls, optimizer: Any) -> Buckets:
        by_family: dict[Hashable, list[_Filled]] = defaultdict(list)
        for bucket in optimizer.reducer.buckets:
            by_family[bucket.plan.family].append(tuple(slot.entry.numel for slot in bucket.plan.slots))
        return cls(optimizer.reducer.pool.capacity, by_family)


def come_again(base: Buckets, more: Sequence[tuple[Buckets, int]]) -> bool:
    """`more`: those of the rank with one layer more, by group of equal layers, and how many the real rank has more."""
    more = [each for each in more if each[1]]
    if any(other.capacity != base.capacity for other, _ in more):
        return False
    return not base.capacity or all(
        all(_has_more(own, other.by_family.get(family, [])) for other, _ in more)
        or _stays_small(base.capacity, own, [(other.by_family.get(family, []), number) for other, number in more])
        for family, own in base.by_family.items()
    )


def _has_more(own: list[_Filled], other: list[_Filled]) -> bool:
    """Whether the other has the same ones and some between them."""
    if own == other:
        return True
    further = len(other) - len(own)
    ahead = next((place for place, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), len(own))
    return further > 0 and own[ahead:] == other[ahead + further :]


def _stays_small(capacity: int, own: list[_Filled], more: Sequence[tuple[list[_Filled], int]]) -> bool:
    """Whether it is one that has room for what all layers add to it, as that of norms."""
    if len(own) != 1 or any(len(other) != 1 for other, _ in more):
        return False
    size = sum(own[0])
    return 4 * (size + sum(number * (sum(other[0]) - size) for other, number in more)) <= capacity
