"""The order in which a rank exchanges messages with the others of its group."""

from __future__ import annotations


def others_from(rank: int, ranks: int) -> list[int]:
    """The other ranks, starting after this one, so that not all ranks talk to rank 0 first."""
    return [(rank + step) % ranks for step in range(1, ranks)]
