"""Losses that jump: what a bad stretch of data, or a rate that is too high, does before anything is infinite."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

_REMEMBERED, _ENOUGH = 50, 10  # losses


class LossSpike(FloatingPointError):
    """A loss was far above those before it; raised on all ranks alike, after the step."""


class SpikeWatch:
    """`factor` times the median of the last 50 losses is a spike, from the 11th on; None: nothing is. Its state are
    these losses, so that a run that goes on judges as it would have.
    """

    def __init__(self, factor: float | None) -> None:
        if factor is not None and not factor > 1:
            raise ValueError(
                f"spike_factor={factor} must be more than 1, or None: losses are never all below their median"
            )
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, step: int, loss: float) -> None:
        """LossSpike for a loss that is one, which is not remembered. What is not finite is `on_nan`'s to judge, and
        says nothing of what is usual.
        """
        if self.factor is None or not math.isfinite(loss):
            return
        if len(self._losses) >= _ENOUGH and (usual := median(self._losses)) > 0 and loss > self.factor * usual:
            raise LossSpike(
                f"the loss of step {step} is {loss:g}, more than spike_factor={self.factor:g} times the median of the "
                f"last {len(self._losses)}, which is {usual:g}"
            )
        self._losses.append(float(loss))  # of a `train_step` of the user's it may be another number

    def state_dict(self) -> list[float]:
        return list(self._losses)

    def load_state_dict(self, losses: Any) -> None:
        if not isinstance(losses, list) or not all(type(loss) is float and math.isfinite(loss) for loss in losses):
            raise ValueError(
                "the last losses of a checkpoint must be a list of finite numbers; it is not what was saved"
            )
        self._losses.clear()
        self._losses.extend(losses)
