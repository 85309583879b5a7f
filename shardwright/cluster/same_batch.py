"""Ranks that compute one sample together must be given the same batch: checked before a shape that is new to a rank is
used.

A rank that meets a new description of a batch tells it to the others of its replica through the store and waits for
theirs. Ranks that were given the same batches until now meet it in the same call, so they all do; a rank that goes on
instead, because it knows what it was given, is found out by the number of calls in its sign of life. A description that
is known costs a look into a set. What batches of one shape hold is looked at now and then (`same_contents`).
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch

from . import groups
from . import job as jobs
from .job import Job
from .same_contents import SameContents

Entry = tuple[str, tuple[int, ...], str]  # name, shape, dtype
_PATIENCE = timedelta(seconds=1)
_MOST = 4096  # kinds of batches remembered
_numbers = itertools.count()


def describe(entries: Any) -> tuple[Entry, ...]:
    """The tensors among (name, value) pairs, by name, shape and dtype."""
    return tuple(
        (str(name), tuple(value.shape), str(value.dtype)) for name, value in entries if isinstance(value, torch.Tensor)
    )


class SameBatch:
    """What the ranks of one replica were given so far. Built by all ranks at the same place of the program.

    ranks  global ranks that must get the same batch
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._number = next(_numbers)
        self._known: set[Any] = set()
        self._calls = 0
        self._generation = jobs.generation()
        self._contents = SameContents(ranks, f"contents/{self._number}")

    def check(self, description: Any, entries: Iterable[tuple[Any, Any]] = ()) -> None:
        """ValueError if another rank of the replica has something else in this call. `description`: nested tuples of
        entries; `entries`: what was given, by name.
        """
        job = jobs.current()
        if job is None or job.world_size == 1:
            return
        if self._generation != job.generation:  # after a recovery: ranks had come differently far in the failed step
            self._generation, self._calls = job.generation, 0
            self._known.clear()
            self._contents.forget()
        if description not in self._known:
            try:
                self._compare(job, description)
            except ValueError as error:
                # All ranks of the replica find this out if all of them compare; one that went on waits for the others
                # now.
                if not job.all_raise(f"batch/{self._number}/{self._calls}"):
                    job.fail(error, f"call {self._calls + 1} of the model")
                raise
            if len(self._known) == _MOST:
                self._known.clear()  # on all ranks of the replica in the same call
            self._known.add(description)
        self._contents.check(job, self._calls, entries)
        self._calls += 1
        job.checks += 1

    def _compare(self, job: Job, mine: Any) -> None:
        name = f"batch/{self._number}/{self._calls}"
        job.tell(f"{name}/{job.rank}", show(mine))
        # In the first call data-parallel ranks compare the names of what they were given, too.
        others = range(job.world_size) if self._calls == 0 else self._ranks
        for rank in others:
            theirs = self._ask(job, rank, f"{name}/{rank}")
            if rank in self._ranks and theirs != show(mine):
                raise ValueError(
                    f"rank {job.rank} and rank {rank} compute every sample together (tensor, sequence or pipeline "
                    "parallel) and must be "
                    f"given the same batch, but in step {self._calls + 1}\n  rank {job.rank} has {show(mine)}\n  rank "
                    f"{rank} has {theirs}\n"
                    "Build the data loader with plugin.prepare_dataloader, or with a DistributedSampler over "
                    "plugin.data_parallel "
                    "instead of over all ranks"
                )
            if names(theirs) != names(show(mine)):
                raise ValueError(
                    f"data-parallel ranks must be given batches with the same entries, but rank {job.rank} has "
                    f"{show(mine)} and rank {rank} has {theirs}"
                )

    def _ask(self, job: Job, rank: int, name: str) -> str:
        limit = groups.get_timeout() or timedelta(minutes=30)
        deadline = time.monotonic() + limit.total_seconds()
        while time.monotonic() < deadline:
            passed = job.checks_of(rank) > job.checks
            theirs = job.ask(name)
            if theirs is not None:
                return theirs
            if passed:
                return "a batch of a kind that it was given before"
            jobs.stop_waiting()
            job.wait_a_little(name, _PATIENCE)
        raise RuntimeError(f"Timed out waiting {limit.total_seconds() * 1000:.0f}ms for rank {rank} to bring its batch")


def show(description: Any) -> str:
    """ "input_ids [4, 16] int64, labels [4, 16] int64"; several microbatches separated by semicolons."""
    if description and isinstance(description[0], tuple) and description[0] and isinstance(description[0][0], tuple):
        return "; ".join(show(part) for part in description)
    return (
        ", ".join(f"{name} {list(shape)} {dtype.removeprefix('torch.')}" for name, shape, dtype in description)
        or "no tensors"
    )


def names(text: str) -> set[str]:
    """The names in what `show` returned."""
    return set(re.findall(r"(\S+) \[", text))
