"""What ranks agree on through the store alone: who asks where all of them stand, and the step at which all stop."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from shardwright.cluster import BrokenJobError, watchdog
from shardwright.cluster.appointment import Appointment
from shardwright.cluster.failure import Failure
from shardwright.cluster.job import Job, JobError, set_current
from shardwright.cluster.watchdog import Inquiry, elect, last_inquiry


def jobs(world: int) -> list[Job]:
    store = dist.HashStore()
    return [Job(store, rank, world) for rank in range(world)]


def test_one_rank_inquires_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_ANSWERS", 0.3)
    monkeypatch.setattr(watchdog, "_DEALING", 0.1)
    members = jobs(4)
    with ThreadPoolExecutor(4) as pool:
        found = [each for each in pool.map(elect, members) if each is not None]
    assert len({each.number for each in found}) == len(found)  # each in place of one that had its time
    assert found[0].number == 1
    holder = last_inquiry(members[0])
    assert holder in found
    other = members[(holder.rank + 1) % 4]
    for stale in (holder._replace(number=holder.number - 2), holder._replace(rank=other.rank)):
        watchdog._close(other, stale)
        assert last_inquiry(other) == holder  # nobody closes another's
    watchdog._close(members[holder.rank], holder)
    assert not last_inquiry(other).is_open
    assert elect(other) == Inquiry(holder.number + 2, other.rank)
    assert elect(members[holder.rank]) == Inquiry(holder.number + 4, holder.rank)  # the other has not closed its own


def test_who_waits_for_an_inquiry_leaves_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = jobs(2)
    mine = elect(first)
    assert mine == Inquiry(1, 0)
    closes = threading.Timer(0.3, watchdog._close, (first, mine))
    closes.start()
    begun = time.monotonic()
    assert elect(second) is None
    assert time.monotonic() - begun < watchdog._ANSWERS
    assert last_inquiry(second) == Inquiry(2, 0)


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_stop_at_one_step(seed: int) -> None:
    """Ranks that keep up with each other, as training does, or do not at all."""
    draw = random.Random(seed)
    world, steps, keeps_up = 3, 60, seed % 2 == 0
    members = jobs(world)
    dates = [Appointment(job, "signals/1") for job in members]
    wants = {draw.randrange(world): draw.randrange(1, 20) for _ in range(draw.choice((1, 2)))}
    meets = threading.Barrier(world)
    watching = True

    def watch() -> None:
        while watching:
            dates[draw.randrange(world)].look()
            time.sleep(0.003 * draw.random())

    def train(rank: int) -> int:
        for step in range(1, steps + 1):
            if keeps_up:
                meets.wait(20)
            time.sleep(0.002 * random.random() * (1 if keeps_up else rank + 1))
            if dates[rank].arrive(wanted=wants.get(rank, steps + 1) <= step):
                return step
        members[rank].tell(f"left/{rank}", "left: its script had ended")
        return 0

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(world) as pool:
            stopped = list(pool.map(train, range(world)))
    finally:
        watching = False
        watcher.join()
    assert len(set(stopped)) == 1, (stopped, wants)
    if keeps_up:
        assert min(wants.values()) <= stopped[0] <= min(wants.values()) + 25


def test_nobody_waits_for_a_rank_that_takes_no_further_step() -> None:
    """Asked in the last step, or behind it, whatever the others do then."""
    for asks_first in (True, False):
        mine, other = (Appointment(job, "signals/1") for job in jobs(2))
        assert not other.arrive(wanted=False)
        if asks_first:
            timer = threading.Timer(0.2, other.leave)
            timer.start()
        else:
            other.leave()
        begun = time.monotonic()
        assert not mine.arrive(wanted=True)
        assert not mine.arrive(wanted=True)
        assert time.monotonic() - begun < 5
        other.look()
        mine.leave()
        assert [mine._promise, other._promise] == [1, float("inf")]


def test_ranks_count_steps_alike_after_a_recovery() -> None:
    """Before it one had come a step further than the other."""
    members = jobs(2)
    dates = [Appointment(job, "signals/1") for job in members]
    for date, steps in zip(dates, (3, 2), strict=True):
        assert not any(date.arrive(wanted=False) for _ in range(steps))
    for job in members:
        job.begin_anew(1, 0)
    assert not any(date.arrive(wanted=False) for date in dates)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda date: date.arrive(wanted=True), dates)) == [True, True]


def test_who_waits_hears_of_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = jobs(2)
    set_current(first)
    try:
        closed = threading.Timer(0.2, setattr, (first, "failure", Failure(1, 1, "", "", "raised", "KeyError: 1")))
        closed.start()
        with pytest.raises(JobError, match="KeyError: 1"):
            Appointment(first, "signals/1").arrive(wanted=True)
        second._store_is_gone = True
        with pytest.raises(BrokenJobError, match="the job's store does not answer, since rank 0, which serves it"):
            Appointment(second, "signals/1").arrive(wanted=True)
    finally:
        set_current(None)
