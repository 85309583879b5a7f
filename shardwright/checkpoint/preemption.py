"""Saving before a job is taken away: the scheduler's signal is noted, and the training loop saves at its next step.

with SaveOnSignal() as signalled:
    for step, batch in enumerate(dataloader):
        ...
        if signalled.anywhere():          # on all ranks alike, once any rank got the signal
            booster.save(run / f"step-{step}", model=model, optimizer=optimizer, step=step)
            break
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from .agreement import Agreement


class SaveOnSignal:
    """Catches signals inside the `with` block, by default SIGTERM; the handlers from before are restored at its end.

    signals   numbers to catch; SIGUSR1 is what slurm's --signal=USR1@120 sends two minutes before the end
    """

    def __init__(self, *signals: int) -> None:
        self._signals = signals or (signal.SIGTERM,)
        self._before: dict[int, Any] = {}
        self._agreement: Agreement | None = None
        self.received: int | None = None

    def __enter__(self) -> SaveOnSignal:
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def anywhere(self) -> bool:
        """Whether any rank has got a signal. All ranks must call, at the same steps: one small message on the host."""
        if self._agreement is None:
            self._agreement = Agreement(dist.get_world_size() if dist.is_initialized() else 1, purpose="signals")
        return self._agreement.union([self.received is not None])[0]
