"""Received tensors that a backward leaves without a gradient, because this batch does not read them.

In one process what made them has no gradient then, and optimizers leave it alone; zeros in its place would have it
decay. So the stage before is told, by a number for each tensor behind the gradients, which it has to read and therefore
to wait for: with the first message of a kind (batches with the same entries, of any lengths), and with each where
messages are not taken to be alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from ..comm.payload import TensorMeta

_FLAG = torch.int8  # not uint8, the dtype of bare bytes, which the planner's replay gives no memory to read flags from


class SilentTensors:
    """What two stages know of their messages, each for its side. always: messages of a kind need not be alike."""

    def __init__(self) -> None:
        self._told: dict[Hashable, tuple[bool, ...]] = {}
        self._asked: set[Hashable] = set()
        self._heard: dict[Hashable, tuple[bool, ...]] = {}

    def forget(self) -> None:
        self._told.clear()
        self._asked.clear()
        self._heard.clear()

    def answer(self, kind: Hashable, leaves: Sequence[Tensor], always: bool) -> list[Tensor]:
        """What goes back for received tensors. ValueError where one is read that was said to be not."""
        silent = tuple(leaf.grad is None for leaf in leaves)
        back = [leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves]
        if not leaves:
            return back
        if always or kind not in self._told:
            self._told[kind] = silent
            return [*back, torch.tensor(silent, dtype=_FLAG, device=leaves[0].device)]
        for leaf, now, before in zip(leaves, silent, self._told[kind], strict=True):
            if before and not now:
                raise ValueError(
                    f"a tensor of shape {tuple(leaf.shape)} that an earlier pipeline stage returned is read by this "
                    "microbatch, but was not by the first one with the same entries, and stages agree on that once; "
                    "give the plugin enable_metadata_cache=False: every message then tells what it is"
                )
        return back

    def expected(self, kind: Hashable, metas: Sequence[TensorMeta], always: bool) -> list[TensorMeta]:
        """What the next stage sends for tensors that were sent to it."""
        if not metas or (kind in self._asked and not always):
            return list(metas)
        self._asked.add(kind)
        return [*metas, TensorMeta((len(metas),), _FLAG, False)]

    def taken(self, kind: Hashable, arrived: Sequence[Tensor], count: int) -> list[Tensor | None]:
        """Gradients of `count` tensors from what has arrived, None for those that have none."""
        if not count:  # what was heard is of steps in which less was frozen
            return []
        if len(arrived) > count:
            self._heard[kind] = tuple(map(bool, arrived[count].tolist()))
        silent = self._heard.get(kind, (False,) * count)
        return [None if none else grad for grad, none in zip(arrived[:count], silent, strict=True)]
