"""Attention heads: how many there are, and which of them each rank computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn as nn

from ..models.config import KEY_VALUE_HEADS, QUERY_HEADS, first_int
from ..spec import PADDING

# Names under which attention modules of transformers keep this count, beside those that configs use too.
HEADS_PER_KEY = ("num_key_value_groups", "num_kv_groups", "n_rep")


class HeadGroup(NamedTuple):
    """A key/value head and the query heads of it that one rank computes; `PADDING` marks heads that do not exist."""

    kv: int
    q_start: int
    q_count: int  # query heads that exist
    q_total: int  # with padding


@dataclass(frozen=True)
class HeadGeometry:
    """Head counts of an unsharded attention.

    num_heads       query heads
    num_kv_heads    key and value heads, of which it is a multiple

    Ranks get whole key/value heads with all their query heads where there are enough. When `ranks` is a multiple of the
    key/value heads, each of these is held by several ranks, which divide its query heads among themselves. What does
    not come out even is uneven as long as every rank has a head; else ranks without a head get one of zeros, which
    contributes nothing and whose gradient is zero.
    """

    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}")

    @property
    def heads_per_key(self) -> int:
        return self.num_heads // self.num_kv_heads

    @classmethod
    def of(cls, attention: nn.Module, config: Any = None) -> HeadGeometry:
        """From the attributes of an attention module, and its config for what it does not keep itself."""
        config = config if config is not None else getattr(attention, "config", None)
        heads = first_int(attention, QUERY_HEADS) or first_int(config, QUERY_HEADS)
        if heads is None:
            raise ValueError(
                f"{type(attention).__name__} keeps no head count ({', '.join(QUERY_HEADS)}); give the "
                "plan a HeadGeometry"
            )
        kv_heads = first_int(attention, KEY_VALUE_HEADS)
        if kv_heads is None and (groups := first_int(attention, HEADS_PER_KEY)):
            kv_heads = heads // groups
        kv_heads = kv_heads or first_int(config, KEY_VALUE_HEADS) or heads
        return cls(heads, kv_heads)

    def groups(self, rank: int, ranks: int) -> list[HeadGroup]:
        """The key/value heads of `rank`, each with the query heads that the rank computes."""
        per_key = self.heads_per_key
        if self.num_kv_heads < ranks and ranks % self.num_kv_heads == 0:
            holders = ranks // self.num_kv_heads
            kv, part = divmod(rank, holders)
            share, extra = divmod(per_key, holders)
            count = share + (part < extra)
            if not count:
                return [HeadGroup(PADDING, PADDING, 0, 1)]
            return [HeadGroup(kv, kv * per_key + part * share + min(part, extra), count, count)]
        share, extra = divmod(self.num_kv_heads, ranks)
        count = share + (rank < extra)
        if not count:
            return [HeadGroup(PADDING, PADDING, 0, per_key)]
        first = rank * share + min(rank, extra)
        return [HeadGroup(kv, kv * per_key, per_key, per_key) for kv in range(first, first + count)]

    def local_heads(self, rank: int, ranks: int) -> int:
        return sum(group.q_total for group in self.groups(rank, ranks))

    def local_kv_heads(self, rank: int, ranks: int) -> int:
        return len(self.groups(rank, ranks))

    def rows(self, kind: str) -> int:
        """Heads along the sharded dim of a projection."""
        keys = {"q": 0, "qk": 1}.get(kind, 2) * self.num_kv_heads
        return self.num_kv_heads if kind == "kv" else self.num_heads + keys

    def local(self, kind: str, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
        """(first head or PADDING, count) runs of a projection's heads on `rank`, in the order that the forward
        expects.
        """
        groups, per_key = self.groups(rank, ranks), self.heads_per_key
        if kind == "interleaved":
            for group in groups:
                base = group.kv * (per_key + 2)
                yield from _queries(group, base - group.kv * per_key)
                yield from _keys(group, base + per_key)
                yield from _keys(group, base + per_key + 1)
            return
        if kind in ("q", "qk", "packed"):
            for group in groups:
                yield from _queries(group, 0)
        if kind == "kv":
            for group in groups:
                yield from _keys(group, group.kv)
        if kind in ("qk", "packed"):
            bases = (self.num_heads, self.num_heads + self.num_kv_heads)
            for base in bases[: 1 if kind == "qk" else 2]:
                for group in groups:
                    yield from _keys(group, base + group.kv)


def _queries(group: HeadGroup, shift: int) -> Iterator[tuple[int, int]]:
    if group.q_count:
        yield group.q_start + shift, group.q_count
    if group.q_total > group.q_count:
        yield PADDING, group.q_total - group.q_count


def _keys(group: HeadGroup, position: int) -> Iterator[tuple[int, int]]:
    yield (PADDING if group.kv == PADDING else position), 1
