"""Chrome traces of some steps of a run, one per rank and one of all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from ..cluster import job
from ..logging import get_dist_logger
from ..pipeline.clocks import ahead_of_first
from ..utils.device import host_device
from ..utils.labels import is_profiling
from ..utils.memory_notes import write_snapshots_to
from . import traces
from .traces import MERGED, note_rank, trace_path

_NOTHING = (
    "booster.profile: {taken} steps were taken, and recording begins behind wait={wait} + warmup={warmup}: there is no "
    "trace. Call profile.step() behind every optimizer.step(), and take at least {least} steps"
)

_open: Profile | None = None  # the one that is entered


class Profile:
    """Records `steps` steps with torch's profiler; see `Booster.profile`.

    directory  rank0.json, rank1.json, ... and merged.json come here. The first rank lets a process of its own merge
               them, beside the steps that follow, and waits for it when the profile is left
    """

    def __init__(self, directory: str | os.PathLike[str], steps: int, wait: int, warmup: int, memory: bool) -> None:
        for name, value, least in (("steps", steps, 1), ("wait", wait, 0), ("warmup", warmup, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"profile({name}={value!r}) must be a whole number of steps, at least {least}")
        self.directory = Path(directory)
        self.steps, self.wait, self.warmup = steps, wait, warmup
        self._taken = 0
        self._memory = memory
        self._is_written = False
        self._profiler: Any = None
        self._merging: subprocess.Popen[bytes] | None = None

    @property
    def is_over(self) -> bool:
        """Whether all steps have been recorded."""
        return self._taken >= self.wait + self.warmup + self.steps

    def __enter__(self) -> Self:
        global _open
        if _open is not None or is_profiling():  # torch has one profiler per process, and crashes where two record
            raise ValueError(
                "booster.profile inside of "
                + ("another" if _open is not None else "a profiler of torch")
                + ": one at a time can record a process; leave that `with` block first"
            )
        self._taken, self._is_written = 0, False  # entered again, it records anew
        self.directory.mkdir(parents=True, exist_ok=True)
        if _rank() == 0:
            (self.directory / MERGED).unlink(missing_ok=True)
        trace_path(self.directory, _rank()).unlink(missing_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.steps, repeat=1),
            on_trace_ready=self._write,
            profile_memory=self._memory,
        )
        self._profiler.__enter__()
        write_snapshots_to(self.directory)
        _open = self
        return self

    def step(self) -> None:
        """A training step is over. Of the last one that is recorded this writes the traces, on all ranks together;
        behind that it does nothing. The merged one is there when the profile is left, at the latest.
        """
        if self._profiler is None:
            raise ValueError("profile.step() outside of `with booster.profile(...) as profile:`")
        if self.is_over:
            return
        self._taken += 1
        self._profiler.step()
        if self.is_over:
            self._finish()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        global _open
        profiler, self._profiler, _open = self._profiler, None, None
        profiler.__exit__(kind, error, trace)
        write_snapshots_to(None)
        if kind is None and not self.is_over:  # after an error the other ranks may not come
            self._finish()
        if kind is None:
            self._wait()

    def _write(self, profiler: Any) -> None:
        if self._taken > self.wait + self.warmup:
            profiler.export_chrome_trace(str(trace_path(self.directory, _rank())))
            self._is_written = True

    def _finish(self) -> None:
        if not self._is_written:
            words = {"taken": self._taken, "wait": self.wait, "warmup": self.warmup}
            least = self.wait + self.warmup + 1
            get_dist_logger().warning(_NOTHING.format(**words, least=least), ranks=[0])
        ahead = 0.0
        if dist.is_initialized() and dist.get_world_size() > 1:
            assert dist.group.WORLD is not None
            ahead = ahead_of_first(dist.group.WORLD, host_device(), time.time)
        if self._is_written:
            note_rank(trace_path(self.directory, _rank()), _rank(), job.this_rank(), ahead)
        if dist.is_initialized():
            dist.barrier()
        if _rank() == 0 and self._is_written:
            self._merge(dist.get_world_size() if dist.is_initialized() else 1)

    def _merge(self, world_size: int) -> None:
        paths = {rank: trace_path(self.directory, rank) for rank in range(world_size)}
        missing = [rank for rank, path in paths.items() if not path.is_file()]
        here = [str(path) for rank, path in paths.items() if rank not in missing]
        self._merging = subprocess.Popen(
            [sys.executable, "-I", str(Path(traces.__file__)), str(self.directory / MERGED), *here],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        if missing:
            get_dist_logger().warning(
                f"{self.directory / MERGED} is without ranks {', '.join(map(str, missing))}, whose machines do not "
                "write to this directory: name one that all machines share",
                ranks=[0],
            )

    def _wait(self) -> None:
        merging, self._merging = self._merging, None
        if merging is None:
            return
        _, said = merging.communicate()
        if merging.returncode:
            last = (said.decode(errors="replace").strip().splitlines() or [f"exit status {merging.returncode}"])[-1]
            get_dist_logger().warning(
                f"{self.directory / MERGED} could not be made ({last}); the traces of the ranks lie beside it",
                ranks=[0],
            )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
