"""Measured timelines of some steps of a run, to show a typical one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ..utils.device import get_current_device
from .executor import PipelineExecutor
from .timeline import Recorder, Timeline

WARM_UP = 2  # steps that a run begins with and that are like no others: connections, caches, compilers


class Camera:
    """Records `steps` steps behind the first `skip` that it watches; of a model without a pipeline it takes none.

    path   where the first rank writes the typical one when all are taken
    """

    def __init__(self, executor: PipelineExecutor, steps: int, skip: int = 0, path: Path | None = None) -> None:
        self.runtime, self.cut = executor.runtime, executor.cut
        self.steps, self.skip, self.path = steps, skip, path
        self.taken: list[Timeline] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step, on all ranks, which start together where it records."""
        self.skip -= 1
        if self.runtime is None or self.skip >= 0 or len(self.taken) == self.steps:
            yield
            return
        recorder = self.runtime.recorder = Recorder(get_current_device())
        dist.barrier()
        try:
            yield
        finally:
            self.runtime.recorder = None
        self.taken.append(recorder.gather(self.runtime.comm, self.cut.placement))
        typical = self.typical()
        if self.path is not None and len(self.taken) == self.steps and dist.get_rank() == 0 and typical is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_timelines({self.cut.pp_style: typical}, self.path)

    def typical(self) -> Timeline | None:
        """The step of median duration: single steps on a shared machine are disturbed now and then."""
        return sorted(self.taken, key=lambda timeline: timeline.makespan)[len(self.taken) // 2] if self.taken else None


def write_timelines(timelines: Mapping[str, Timeline], path: Path) -> None:
    """Timelines by name, for `read_timelines`."""
    path.write_text(json.dumps({name: timeline.to_plain() for name, timeline in timelines.items()}))


def read_timelines(path: Path) -> dict[str, Timeline]:
    """What `write_timelines` has written; ValueError for anything else."""
    try:
        return {name: Timeline.from_plain(plain) for name, plain in json.loads(path.read_text()).items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} holds no timelines: {error}") from error
