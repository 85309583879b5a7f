"""One save at a time, in the background if wanted; what goes wrong there is raised at the next call, unless whoever has
started it forgives it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..utils.streams import has_streams, host_memory, streams_of
from .guard import Guard, active

T = TypeVar("T")


class Background:
    """Runs jobs one after the other in a thread that the interpreter waits for at its end."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._guard: Guard | None = None  # of the job that runs, or ran last

    def wait(self) -> None:
        """Until the running job has ended; raises what it raised, and its guard does not forgive."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None and not (self._guard is not None and self._guard.forgives(error)):
            raise error

    def start(self, job: Callable[[], object]) -> None:
        """Run `job` once the one before has ended (whose error is raised here)."""
        self.wait()
        self._guard = active()

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="shardwright-checkpoint")
        self._thread.start()


@torch.no_grad()
def snapshot(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies in host memory, pinned for those that come from an accelerator, where all copies run at
    once.
    """
    copies = []
    for tensor in tensors:
        copy = host_memory(tensor.shape, tensor.dtype, tensor.device)
        copies.append(copy.copy_(tensor, non_blocking=has_streams(tensor.device)))
    for streams in {streams_of(tensor.device) for tensor in tensors} - {None}:
        streams.synchronize()
    return copies
