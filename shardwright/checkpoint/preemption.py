"""Saving before a job is taken away: the scheduler's signal is noted, and the training loop saves at its next step.

with SaveOnSignal() as signalled:
    for step, batch in enumerate(dataloader):
        ...
        if signalled.anywhere():          # on all ranks alike, once any rank got the signal
            booster.save(run / f"step-{step}", model=model, optimizer=optimizer, step=step)
            break
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from ..cluster import job as jobs
from ..cluster.appointment import Appointment
from .agreement import Agreement

_active: weakref.WeakSet[SaveOnSignal] = weakref.WeakSet()


class SaveOnSignal:
    """Catches signals inside the `with` block, by default SIGTERM; the handlers from before are restored at its end.

    signals   numbers to catch; SIGUSR1 is what slurm's --signal=USR1@120 sends two minutes before the end
    """

    def __init__(self, *signals: int) -> None:
        self.signals = signals or (signal.SIGTERM,)
        self._before: dict[int, Any] = {}
        self._agreement: Agreement | None = None
        self._appointment: Appointment | None = None
        self._job: jobs.Job | None = None
        self.received: int | None = None

    def __enter__(self) -> SaveOnSignal:
        for number in self.signals:
            self._before[number] = signal.signal(number, self._note)
        _active.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.discard(self)
        if self._job is not None and self._appointment is not None:
            self._job.answers.remove(self._appointment.look)
            self._appointment.leave()
            self._job = self._appointment = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def leave_to_child(self) -> None:
        """A forked child (of a `multiprocessing.Pool`) saves nothing, and is to end when it is told to."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                # what watches over this process does not over its children
                is_ours = getattr(handler, "__module__", "").startswith(__name__.partition(".")[0])
                signal.signal(number, signal.SIG_DFL if is_ours or handler is None else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def anywhere(self) -> bool:
        """Whether any rank has got a signal. All ranks must call, at the same steps, and are answered alike.

        In a job that `launch` has joined that costs nothing before there is a signal, after which ranks agree on a step
        that none of them has passed; in another, one small message on the host per call.
        """
        job = jobs.current()
        if job is not None and job.world_size > 1:
            return self._appointed(job).arrive(self.received is not None)
        if self._agreement is None:
            self._agreement = Agreement(dist.get_world_size() if dist.is_initialized() else 1, purpose="signals")
        return self._agreement.union([self.received is not None])[0]

    def _appointed(self, job: jobs.Job) -> Appointment:
        if self._appointment is None or self._job is not job:
            job.appointed += 1
            self._job, self._appointment = job, Appointment(job, f"signals/{job.appointed}")
            job.answers.append(self._appointment.look)
        return self._appointment


_mask = threading.local()  # of signals, from before a fork


def _hold() -> None:
    """A signal that reaches the child before it has left ours waits until then."""
    numbers = {number for each in tuple(_active) for number in each.signals}
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


def _release_child() -> None:
    for each in tuple(_active):
        each.leave_to_child()
    _release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_release_child)
