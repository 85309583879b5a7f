"""Where the reduction of a section stands."""

from __future__ import annotations

from collections.abc import Collection

from .bucket import Bucket
from .layout import Slot


class Window:
    """Progress of one section between two reductions: which slots are missing, which bucket is next."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = buckets
        self.close()

    def close(self) -> None:
        self.next = 0
        self.is_open = False  # whether buckets leave as they are complete
        self.missing: list[set[Slot]] = []

    def open(self, awaited: set[Slot] | None = None) -> None:
        """Gradients come now: those of all slots, or of the `awaited` ones."""
        self.next, self.is_open = 0, True
        self.missing = [
            set(bucket.plan.slots) if awaited is None else awaited.intersection(bucket.plan.slots)
            for bucket in self.buckets
        ]

    @property
    def has_complete(self) -> bool:
        """Whether the next bucket may leave."""
        return self.next < len(self.buckets) and not self.missing[self.next]


def next_of(windows: Collection[Window]) -> Window | None:
    """Which of several sections that are reduced together is the next to have a bucket leave; None when all have left.

    That is the one whose bucket backward fills first, as within a section: the same on all ranks, whatever comes when.
    """
    left = [window for window in windows if window.next < len(window.buckets)]
    return min(left, key=lambda window: window.buckets[window.next].plan.turn, default=None)
