"""What travels of that which units return, where it is not all of it.

A rank may hold units' outputs whole that it shares with others: then each sends its part, and the next stage makes
them whole again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch


class Handover:
    """All travels as it is.

    ranks   of which each may send a part
    """

    ranks = 1

    def sent(self, unit: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Of the tensors that a unit has returned; see `Template`."""
        return tensors

    def received(self, unit: int, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """What the unit had returned, from what was sent of it."""
        return tensors

    def whole_shapes(self) -> AbstractContextManager[None]:
        """Inside, the copy without data returns what one rank would that shares nothing."""
        return nullcontext()
