"""Going on after a step that failed: new communicators under the same process groups, where nothing of the failed step
lasts.

What a failed step leaves behind is known in every place that keeps something over steps, which compares
`job.generation()` with the one it was made in: headers and schedules of a pipeline, sums under way, what batches were
compared. Weights that have begun to change, and torch's FSDP2, which cannot be told that a step is over, are refused.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ..utils.random import set_seed
from . import groups
from . import job as jobs
from .errors import BrokenJobError
from .job import Job

_RESTART = "restart the job from its last checkpoint"


def recover(timeout: float = 60) -> None:
    """Give the job new communicators after a step failed and every rank caught the error. All ranks call it, within
    `timeout` seconds.

    Every process group keeps its identity and gets new connections. Call `optimizer.zero_grad()` next: the gradients of
    the failed step are those of some microbatches on some ranks. Random generators are seeded anew, alike on all ranks.
    gloo only, four times per process; not under TorchFSDPPlugin, and not where the optimizer had begun to change
    weights: BrokenJobError on all ranks.
    """
    job = jobs.current()
    if job is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("recover() needs a job that was started by shardwright.launch_from_torch() or launch()")
        return
    if job.failure is None:
        error = sys.exception()  # what the script has caught, where it did not come up in one of the calls that tell
        job.fail(error if isinstance(error, Exception) else RuntimeError("recover() was called"))
    why_not = job.why_not_to_recover()
    if why_not:
        raise BrokenJobError(f"{why_not}: {_RESTART}")
    generation = job.generation + 1
    checks = _agree(job, f"shardwright/job/{generation}/recover/", timeout)
    groups.reconnect_all(job.store, generation)
    job.begin_anew(generation, checks)
    set_seed(int(_agreed_seed(job, f"shardwright/job/{generation}/seed")))


def _agree(job: Job, name: str, timeout: float) -> int:
    """Wait for all ranks, whose weights must fit together; returns the most checks of batches that any has passed."""
    job.require_store("recover()")
    job.store.set(f"{name}{job.rank}", json.dumps([job.stepped, job.updating, job.checks]))
    try:
        job.store.wait([f"{name}{rank}" for rank in range(job.world_size)], timedelta(seconds=timeout))
    except RuntimeError as error:
        job.ask("failure")  # whether there is still somebody to ask
        job.require_store("recover()")
        missing = [rank for rank in range(job.world_size) if not job.store.check([f"{name}{rank}"])]
        raise BrokenJobError(
            f"recover() must be called by all {job.world_size} ranks, and within {timeout:g} s rank(s) {missing} did "
            "not"
        ) from error
    stepped, updating, checks = zip(
        *(json.loads(job.store.get(f"{name}{rank}")) for rank in range(job.world_size)), strict=True
    )
    if any(updating):
        raise BrokenJobError(
            f"rank(s) {[rank for rank, began in enumerate(updating) if began]} had begun to change weights in the "
            f"optimizer step that failed, so the ranks' weights no longer fit together: {_RESTART}"
        )
    if min(stepped) != max(stepped):
        raise BrokenJobError(
            f"rank(s) {[rank for rank, steps in enumerate(stepped) if steps == max(stepped)]} had taken the optimizer "
            f"step that others had not when the step failed, so their weights no longer fit together: {_RESTART}"
        )
    return max(checks)


def _agreed_seed(job: Job, name: str) -> str:
    """A seed that rank 0 draws: ranks that stopped at different places have drawn different amounts of random
    numbers.
    """
    if job.rank == 0:
        job.store.set(name, str(int(torch.randint(2**31, ()))))
    return bytes(job.store.get(name)).decode()
