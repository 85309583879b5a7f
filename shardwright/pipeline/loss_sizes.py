"""Verdicts about a loss for sizes between some for which it was followed.

To follow a loss takes tens of milliseconds on every rank, and texts of ragged lengths bring a new shape in every step. What a head and a
criterion do seldom depends on sizes, and if it does, then from some size on (tokens, too, are more where sizes are larger). So a verdict
that was found for smaller and for larger sizes is taken for those between, where microbatches have the same entries and dtypes, count
samples along the same dims, and have the same dims of size one.

Nothing goes wrong unseen should it be untrue. The last stage follows the loss once more in every microbatch, with its values, and refuses
what is no sum. What it cannot judge by that, because a criterion has read numbers off tensors or by `len()`, is looked at ahead for this
very shape after all (`Verdict.exact`). And no verdict is taken that says more than that the loss is right: where `len()` stands in the
arithmetic, how ready-made microbatches are counted, that a criterion needs only some columns of the logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from ..comm.shape_rules import Sizes, split_sizes
from .loss_weight import Verdict
from .microbatch import Batch, batch_size, find_batch_dim, items_of


class _Range:
    """Sizes for which `verdict` was found, of which no other of them is in every size at most (`least`) or at least (`most`) as large."""

    def __init__(self, verdict: Verdict, held: Any) -> None:
        self.verdict = verdict
        self.held = held
        self.least: list[Sizes] = []
        self.most: list[Sizes] = []

    def holds(self, sizes: Sizes) -> bool:
        return any(_is_within(small, sizes) for small in self.least) and any(_is_within(sizes, large) for large in self.most)

    def add(self, sizes: Sizes) -> None:
        self.least = [sizes, *(small for small in self.least if not _is_within(sizes, small))]
        self.most = [sizes, *(large for large in self.most if not _is_within(large, sizes))]


class KnownRanges:
    """`most`: how many kinds of microbatches are remembered."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._ranges: OrderedDict[Hashable, _Range] = OrderedDict()

    def find(self, asked: Hashable, key: Hashable, microbatch: Batch) -> Verdict | None:
        """The verdict about a microbatch whose shapes `key` describes; `asked` is what else verdicts depend on."""
        form, sizes = _form(asked, key, microbatch)
        found = self._ranges.get(form)
        if found is None or not found.holds(sizes):
            return None
        self._ranges.move_to_end(form)
        return found.verdict

    def add(self, asked: Hashable, key: Hashable, microbatch: Batch, verdict: Verdict, held: Any) -> None:
        """`held`: what must live as long as `asked` is remembered."""
        form, sizes = _form(asked, key, microbatch)
        found = self._ranges.get(form)
        plain = verdict.followed and verdict.error is None and not verdict.lengths and verdict.counts is None
        if not plain or (found is not None and found.verdict != verdict):
            self._ranges.pop(form, None)
            return
        if found is None:
            found = self._ranges[form] = _Range(verdict, held)
            if len(self._ranges) > self._most:
                self._ranges.popitem(last=False)
        found.add(sizes)


def _form(asked: Hashable, key: Hashable, microbatch: Batch) -> tuple[Hashable, Sizes]:
    look, sizes = split_sizes(key)
    samples = batch_size(microbatch)
    dims = tuple(find_batch_dim(name, value, samples) for name, value in items_of(microbatch) if isinstance(value, torch.Tensor))
    return (asked, look, dims, tuple(size if size < 2 else None for size in sizes)), sizes


def _is_within(sizes: Sizes, others: Sizes) -> bool:
    return all(size <= other for size, other in zip(sizes, others, strict=True))
