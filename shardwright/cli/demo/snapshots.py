"""Measured timelines of some steps, to show a typical one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ...pipeline.executor import PipelineExecutor
from ...pipeline.timeline import Recorder, Timeline
from ...utils.device import get_current_device

SNAPSHOTS = 9


class Camera:
    """Records the pipeline of the last `SNAPSHOTS` steps of training; without a pipeline it does nothing."""

    def __init__(self, executor: PipelineExecutor, last_step: int) -> None:
        self.runtime, self.placement = executor.runtime, executor.cut.placement
        self.first = last_step - SNAPSHOTS + 1
        self.taken: list[Timeline] = []

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Collective over all ranks where it records: clocks are aligned at the step's start, so ranks must start
        together.
        """
        if self.runtime is None or step < self.first:
            yield
            return
        recorder = self.runtime.recorder = Recorder(get_current_device())
        dist.barrier()
        yield
        self.runtime.recorder = None
        self.taken.append(recorder.gather(self.runtime.comm, self.placement))

    def typical(self) -> Timeline | None:
        """The step of median duration: single steps on a shared machine are disturbed now and then."""
        return sorted(self.taken, key=lambda timeline: timeline.makespan)[len(self.taken) // 2] if self.taken else None
