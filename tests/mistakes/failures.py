"""Ranks that fail, stall, leave or are given something else than the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

import shardwright
from shardwright.booster import Booster
from shardwright.cluster import BrokenJobError, JobError
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import zoo

from .table import mistake, refused

NAME = "llama-causal-lm"


class _Job:
    """A tiny model over a pipeline of `pp` ranks, in a job as `launch_from_torch` makes it."""

    def __init__(self, rank: int, world: int, pp: int = 2, tp: int = 1, zero: int = 0, timeout: float = 30) -> None:
        # as in a script: the checker of DETAIL waits where nothing can wake it
        dist.set_debug_level(dist.DebugLevel.OFF)
        shardwright.launch(rank, world, None, None, timeout=timeout)
        self.booster = Booster(
            plugin=HybridParallelPlugin(precision="fp32", pp_size=pp, tp_size=tp, zero_stage=zero, num_microbatches=2)
        )
        model = zoo.build(NAME, num_hidden_layers=2)
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        self.step()  # in the first one the ranks compare what they were given

    def settle(self) -> None:
        """Leave the ranks as the next row wants to find them."""
        shardwright.recover()
        self.optimizer.zero_grad()

    def step(self, batches: Iterator[Any] | None = None, criterion: Any = None) -> Any:
        batches = batches if batches is not None else iter([zoo.inputs(NAME, batch_size=4, seed=0)])
        result = self.booster.execute_pipeline(
            batches, self.model, criterion or (lambda outputs, _: outputs.loss), self.optimizer
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result


def _told(job: _Job, rank: int, failing: int, *parts: str, **step: Any) -> None:
    """The step raises on all ranks: on the failing one its own error, on the others the story of it."""
    started = time.monotonic()
    if rank == failing:
        with refused(parts[-1], by=Exception):
            job.step(**step)
    else:
        # A rank that is so late that it begins the step when the job has ended is told the same by the refusal to
        # begin.
        with refused(f"rank {failing} \\(", "step 2 of execute_pipeline", *parts, by=(JobError, BrokenJobError)):
            job.step()
    assert time.monotonic() - started < 10
    job.settle()


@mistake(
    symptom="one rank raises in the criterion (a guard against NaN, a bad label)",
    gets="every rank raises within seconds: the rank, its place, step, action, microbatch and the first traceback",
    fix="mend the cause; to go on in the same process, see the next rows",
    worlds=(2, 4),
    alone=True,
)
def raises_in_the_criterion(rank: int, world: int) -> None:
    def criterion(outputs: Any, _: Any) -> Any:
        raise ValueError("label 90 makes no sense")

    _told(_Job(rank, world), rank, world - 1, "microbatch 0", "label 90 makes no sense", criterion=criterion)


@mistake(
    symptom="the data iterator of one rank raises, or ends before the others'",
    gets="every rank raises within seconds, with that rank's error",
    fix="give all ranks equally many batches: `plugin.prepare_dataloader` does",
    worlds=(2, 4),
    alone=True,
)
def raises_in_the_data_iterator(rank: int, world: int) -> None:
    def batches() -> Iterator[Any]:
        raise OSError("shard 7 is unreadable")
        yield

    _told(_Job(rank, world), rank, 0, "shard 7 is unreadable", batches=batches())


@mistake(
    symptom="`except Exception: continue` around a step that failed in the middle on one rank",
    gets="the next step, backward, optimizer step or checkpoint is refused on every rank: it says which error broke "
    "the communicators",
    fix="restart from a checkpoint; or let every rank call `shardwright.recover()` and `optimizer.zero_grad()`, and go "
    "on",
    worlds=(2, 4),
    alone=True,
)
def goes_on_after_a_failed_step(rank: int, world: int) -> None:
    job = _Job(rank, world)

    def criterion(outputs: Any, _: Any) -> Any:
        if rank == world - 1:
            raise ValueError("once")
        return outputs.loss

    with refused("once", by=Exception):
        job.step(criterion=criterion)
    for call in (job.step, job.optimizer.step):
        with refused("once", r"shardwright\.recover\(\)", by=BrokenJobError):
            call()
    shardwright.recover()
    job.optimizer.zero_grad()
    job.step()


@mistake(
    symptom="`except torch.OutOfMemoryError: continue` around a forward that raised on one rank, at ZeRO stage 3 or "
    "with tp_size > 1",
    gets="the other ranks, which wait for that rank in their forwards, raise within seconds; whatever comes next is "
    "refused on every rank",
    fix="let every rank catch it, call `shardwright.recover()` and `optimizer.zero_grad()`, and go on. What all ranks "
    "raise breaks nothing",
    worlds=(2,),
    alone=True,
)
def goes_on_after_a_failed_forward(rank: int, world: int) -> None:
    job = _Job(rank, world, pp=1, zero=3)
    batch = zoo.inputs(NAME, batch_size=4, seed=0)
    before = job.model(**batch).loss.item()
    raising = {0, 1}

    def raise_in_a_layer(*_: Any) -> None:
        if rank in raising:
            raise MemoryError("too long a sample")

    hook = job.model.model.layers[0].register_forward_hook(raise_in_a_layer)
    with refused("too long a sample", by=MemoryError):
        job.model(**batch)
    raising.discard(0)
    with refused("too long a sample", by=(MemoryError, JobError)):
        job.model(**batch)
    with refused("too long a sample", r"shardwright\.recover\(\)", by=BrokenJobError):
        job.model(**batch)
    hook.remove()
    job.settle()
    assert job.model(**batch).loss.item() == before
    job.step()


@mistake(
    symptom="all ranks of a pipeline make the same mistake (`execute_pipeline(dataloader, ...)` instead of an "
    "iterator)",
    gets="a ValueError on every rank; nothing is broken, the next step runs",
    fix="`iter(dataloader)`",
    worlds=(2,),
    alone=True,
)
def the_same_mistake_on_all_ranks(rank: int, world: int) -> None:
    job = _Job(rank, world)
    with refused("data_iter must be an iterator"):
        job.step([zoo.inputs(NAME, batch_size=4, seed=0)])  # type: ignore[arg-type]
    job.step()


@mistake(
    symptom="in mid-training, ranks of one tensor-parallel or pipeline group get batches of different sizes, dtypes or "
    "keys",
    gets="refused before anything is exchanged, with both batches named",
    fix="`plugin.prepare_dataloader`, or a `DistributedSampler` over `plugin.data_parallel` instead of over all ranks",
    worlds=(4,),  # of two ranks the group is the default one, which the test harness makes with DETAIL
    alone=True,
)
def another_batch_on_one_rank(rank: int, world: int) -> None:
    job = _Job(rank, world, pp=1, tp=2)
    size = 2 if rank == 1 else 4
    with refused("must be given the same batch", by=Exception):
        job.step(iter([zoo.inputs(NAME, batch_size=size, seed=0)]))
    job.settle()


@mistake(
    symptom="in mid-training, ranks of one tensor-parallel, sequence or pipeline group get other tokens or labels in "
    "batches of equal shapes, from collators that draw with other seeds for one",
    gets="refused a step later, with two of the ranks: looked at in the second step and in every 50th from there on",
    fix="equal seeds for what is random in the data of one replica, and one loader for all of its ranks",
    worlds=(4,),
    alone=True,
)
def other_numbers_on_one_rank(rank: int, world: int) -> None:
    job = _Job(rank, world, pp=1, tp=2)
    batch = zoo.inputs(NAME, batch_size=4, seed=0)
    batch["labels"][1, 3] = rank
    job.step(iter([batch]))
    with refused("must be given the same batch, but in step 2 they were given other numbers", by=Exception):
        job.step()
    job.settle()


@mistake(
    symptom="one rank leaves the loop early, calls `sys.exit` or is killed while the others wait for it",
    gets="the others end within seconds and say which rank went and how",
    fix="let all ranks run equally many steps",
    worlds=(2,),
    alone=True,
)
def leaves_early(rank: int, world: int) -> None:
    from shardwright.cluster import ending, groups
    from shardwright.cluster import job as jobs

    job = _Job(rank, world)
    if rank == 1:
        me = jobs.current()
        assert me is not None
        ending.at_exit(me)  # what the interpreter does at its end
        groups.close_all()
        deadline = time.monotonic() + 20
        # recover() tells others of a failure where none is known
        while me.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        with refused("rank 1 .*left: its script had ended while rank 0 still waited for it", by=JobError):
            job.step()
    job.settle()


@mistake(
    symptom="one rank sleeps (a debugger, a slow disk, a lock) longer than `launch_from_torch(timeout=...)`",
    gets="the job ends soon after the timeout and says what every rank was doing, the late one first",
    fix="a longer `timeout=`, or look at the stack of the late rank",
    worlds=(2,),
    alone=True,
)
def sleeps_longer_than_the_timeout(rank: int, world: int) -> None:
    from shardwright.cluster import groups

    job = _Job(rank, world, timeout=3)
    assert groups.get_timeout() is not None
    if rank == 1:
        time.sleep(7)
    with refused("waited too long|Timed out", by=Exception):
        job.step()
    job.settle()
