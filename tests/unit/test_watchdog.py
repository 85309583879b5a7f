"""Whom the others wait for, and how long a step may take."""

from __future__ import annotations

import bdb
import socket
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright
from shardwright.checkpoint.background import Background
from shardwright.cluster import standing, watchdog
from shardwright.cluster.ending import STALLED_CODE, code_of
from shardwright.cluster.failure import failure_of_store, main_frames, waits_for_save, waits_in
from shardwright.cluster.heart import OUTSIDE, Budgets, Heart
from shardwright.cluster.heart import heart as shared_heart
from shardwright.cluster.job import Job
from shardwright.cluster.launch import _idle_limit, _step_limit
from shardwright.cluster.standing import COMPILATION, DEBUGGER, Standing, busy_with, collective_of, stand
from shardwright.cluster.watch import Watch
from shardwright.cluster.watchdog import is_excused, is_silent, verdict
from shardwright.interface import OptimizerWrapper


def at(rank: int, waits: bool = True, number: int = 7, **groups: int) -> Standing:
    counts = {name.replace("_", ", ").removeprefix("g"): count for name, count in groups.items()}
    return Standing(rank, f"dp={rank}", f"step {number}", number, waits, "all_reduce" * waits, counts, ("a", "b"), "")


def outside(rank: int, **groups: int) -> Standing:
    return replace(at(rank, number=6, **groups), doing=OUTSIDE)


@pytest.mark.parametrize(
    ("standings", "silent", "late", "words"),
    [
        ([at(0), at(2)], [1], 1, "no sign of life"),
        ([at(0), at(1, waits=False, number=9), at(2, waits=False, number=8)], [], 2, "did not come, but was in step 8"),
        ([at(0, g0_1=5), at(1, g0_1=4)], [], 1, "over ranks 0, 1 it has called 4 collectives and others 5"),
        ([at(0, g0_1=5, g0_2=9), at(1, g0_1=5), at(2, g0_2=7)], [], 2, "over ranks 0, 2 it has called 7"),
        # a barrier that one of them calls, and one that one of them leaves out
        ([at(0, g0_1_2=4), outside(1, g0_1_2=5), at(2, g0_1_2=4)], [], 1, "no other rank calls the all_reduce"),
        ([outside(0, g0_1_2=5), outside(1, g0_1_2=5), at(2, g0_1_2=4)], [], 2, "has called 4 collectives and others 5"),
        ([at(0, g0_1=4), outside(1, g0_1=5)], [], 1, "no other rank calls the all_reduce"),
        ([at(0, number=3), at(1, number=2)], [], 1, "all ranks wait for one another"),
        ([at(0, waits=False), at(1, waits=False)], [], 0, "no rank waits for another"),
        ([at(0, waits=False, g0_1=3), at(1, waits=False, g0_1=2)], [], 1, "others 3"),  # a GPU's host waits in C++
    ],
)
def test_the_late_rank_is_named(standings: list[Standing], silent: list[int], late: int, words: str) -> None:
    rank, why = verdict({standing.rank: standing for standing in standings}, silent)
    assert rank == late
    assert words in why
    assert Standing.from_json(standings[0].to_json()) == standings[0]


@pytest.mark.parametrize("moves", [0, 1, 3, 100])
def test_words_and_stack_are_of_one_moment(moves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank begins another call `moves` times just when it is looked at."""
    watched, look, left = Heart(), standing.main_frames, [moves]

    def looked_at() -> Any:
        if left[0]:
            left[0] -= 1
            watched.leave()
            watched.enter("Booster.save")
        return look()

    monkeypatch.setattr(standing, "heart", watched)
    monkeypatch.setattr(standing, "main_frames", looked_at)
    watched.enter("Booster.execute_pipeline")
    found = stand(1, "dp=1")
    assert found.moved == (moves == 100)
    assert ("it went on while it was looked at" in found.line()) == found.moved
    assert found.moved or found.doing == watched.words()
    assert "looked_at" in found.stack
    assert Standing.from_json(found.to_json()) == found


def test_who_is_in_a_debugger_or_compiles_is_not_stuck() -> None:
    told: list[str] = []

    class Asks(bdb.Bdb):
        def user_line(self, frame: FrameType) -> None:
            told.append(busy_with(sys._getframe()))
            self.set_continue()

    Asks().runcall(lambda: len(told))

    def backend(*_: Any) -> Any:
        told.append(busy_with(sys._getframe()))
        return lambda x: (x + 1,)

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert told == [DEBUGGER, COMPILATION]
    assert busy_with(sys._getframe()) == ""
    debugs, compiles = replace(at(0), busy=DEBUGGER), replace(at(0), busy=COMPILATION)
    assert [is_excused({0: one, 1: at(1)}, learned) for one in (debugs, compiles) for learned in (True, False)] == [
        True,
        True,
        True,
        False,
    ]
    assert not is_excused({0: at(0), 1: at(1)}, learned=True)


def test_who_waits_in_an_operator_of_torchs() -> None:
    """DTensor, FSDP's norm of gradients and compiled code wait for other ranks by operators, whose frames are not
    torch.distributed's; what DTensor computes is in frames of torch.distributed, and waits for nobody.
    """
    seen: dict[str, tuple[bool, str]] = {}

    class Looks(TorchDispatchMode):
        """Runs where the operator would, called from torch's frame of it."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            frame: FrameType | None = sys._getframe()
            while frame is not None and not frame.f_code.co_filename.endswith("torch/_ops.py"):
                frame = frame.f_back
            assert frame is not None
            seen[str(func)] = waits_in(frame), collective_of(frame)
            return args[0]

    ones = torch.ones(3)
    with Looks():
        torch.ops._c10d_functional.wait_tensor(ones)
        torch.ops.aten.relu(ones)
    assert seen["_c10d_functional.wait_tensor.default"] == (True, "wait_tensor of [3] float32")
    assert seen["aten.relu.default"] == (False, "")

    def frame_in(file: str) -> FrameType:
        found: dict[str, Any] = {}
        exec(compile("frame = sys._getframe()", file, "exec"), {"sys": sys}, found)
        return cast("FrameType", found["frame"])

    assert not waits_in(frame_in("/torch/distributed/tensor/_dispatch.py"))
    assert waits_in(frame_in("/torch/distributed/tensor/_collective_utils.py"))
    assert waits_in(frame_in("/torch/distributed/distributed_c10d.py"))


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that is stopped nothing is expected behind the limit, of others a little longer; and who waits for
    nobody needs no answer.
    """
    waits, stopped = [True], [False]
    monkeypatch.setattr(watchdog, "main_stack", lambda: (waits[0], ()))
    monkeypatch.setattr(watchdog, "is_stopped", lambda pid: stopped[0])
    monkeypatch.setattr(watchdog.groups, "get_timeout", lambda: timedelta(seconds=60))
    here = socket.gethostname(), 7

    def silent(given: Any, seconds: float) -> bool:
        monkeypatch.setattr(watchdog.heart, "budgets", Budgets(given))
        return is_silent(seconds, here)

    assert [silent(3.0, seconds) for seconds in (2.0, 4.0, 12.0, 14.0)] == [False, False, False, True]
    assert [silent("auto", seconds) for seconds in (14.0, 69.0, 71.0)] == [False, False, True]
    assert not silent(None, 1e6)
    stopped[0] = True
    assert [silent(3.0, seconds) for seconds in (2.0, 4.0)] == [False, True]
    waits[0] = False
    assert not silent(3.0, 1e6)


def test_a_silent_store_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is overdue just when the store has stopped: that the inquiry may take 10 s adds nothing to what the
    watching thread has waited for.
    """
    here, told, forever = (socket.gethostname(), 7), [], threading.Event()
    job = SimpleNamespace(server=here, server_stopped=False, failure=None, ending=False, has_store=True, rank=1)
    mine = Heart()
    mine.budgets = Budgets(1.0)
    mine.enter("Booster.execute_pipeline")
    asked = time.monotonic()
    mine.since = asked - 1.0
    watches = watchdog.Watchdog(cast("Job", job), lambda: asked)

    def end_alone(_: Any, why: str) -> None:
        told.append((why, time.monotonic() - asked))
        watches._done.set()

    for name, value in {
        "heart": mine,
        "main_stack": lambda: (True, ()),
        "is_stopped": lambda _: True,
        "_inquire": lambda *_: forever.wait(60),
        "_end_alone": end_alone,
    }.items():
        monkeypatch.setattr(watchdog, name, value)
    watches.start()
    watches.join(60)
    forever.set()
    ((why, seconds),) = told
    assert "execute_pipeline had taken" in why
    assert "its budget is 1 s" in why
    assert seconds < watchdog._STORE - 1
    assert job.server_stopped


def test_a_store_that_was_stopped_and_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has seen it stopped when it was asked does not take it for dead; once it has answered again, it
    does.
    """
    asked, stopped = [cast("float | None", 1.0)], [True]
    job = SimpleNamespace(server=(socket.gethostname(), 7), server_stopped=False, has_store=True)
    watches = watchdog.Watchdog(cast("Job", job), lambda: asked[0])
    monkeypatch.setattr(watchdog, "is_stopped", lambda pid: stopped[0])
    watches._note_server()
    stopped[0], asked[0], job.has_store = False, None, False  # another rank has ended it
    watches._note_server()
    assert job.server_stopped
    job.has_store = True  # it was let go on, and answers
    watches._note_server()
    assert not job.server_stopped
    for served_by, words in (("rank 0", "it was stopped"), ("torchrun", "torchrun was stopped")):
        failure = failure_of_store(1, "dp=1", served_by, stopped=True)
        assert f"held the job up: {words}, and with it the job's store" in failure.headline
        assert code_of(failure) == STALLED_CODE
        assert code_of(failure_of_store(1, "dp=1", served_by, stopped=False)) == 1


def test_who_waits_for_its_own_save_is_seen_by_what_saves() -> None:
    background, told, done = Background(), list[Standing](), list[bool]()

    def look() -> None:
        while not waits_for_save(main_frames()[1]):
            time.sleep(0.01)
        told.append(stand(0, "dp=0"))
        done.append(True)

    def save_in(file: str) -> None:
        done.clear()
        code = compile("while not done: pass", str(Path(shardwright.__file__).parent / file), "exec")
        background.start(partial(exec, code, {"done": done}))
        looks = threading.Thread(target=look)
        looks.start()
        background.wait()
        looks.join()

    save_in("files/disk.py")
    save_in("comm/collectives.py")
    writes, waits = told
    assert (writes.saves, writes.waits, waits.saves, waits.waits) == (True, False, True, True)
    assert "rank 0 (dp=0) waits for its own save, which works at disk.py:1" in writes.line()
    assert "rank 0 (dp=0) waits for its own save, which waits, in" in waits.line()
    assert all("save_in: background.wait()" in each.line() for each in told)
    assert not stand(0, "dp=0").saves
    assert Standing.from_json(writes.to_json()) == writes


def test_budgets_are_learned_from_steps_alone() -> None:
    budgets = Budgets("auto", least=180.0)
    for _ in range(5):
        assert budgets.of("Booster.execute_pipeline") is None
        for call in ("Booster.execute_pipeline", "Booster.save", "OptimizerWrapper.step"):
            budgets.note(call, 10.5 if call == "Booster.execute_pipeline" else 0.1)
    assert budgets.of("Booster.execute_pipeline") == 210.0
    assert budgets.of("OptimizerWrapper.step") == 180.0
    assert budgets.of("Booster.save") is None
    assert [budgets.of_silence(call) for call in ("Booster.save", "OptimizerWrapper.step", "")] == [180.0, None, None]
    assert "no rank may be silent for 180 s in it, as 9/10 of launch(timeout=...)" in budgets.why("Booster.save")
    assert Budgets(5).of_silence("Booster.save") == 5
    assert Budgets(None).of_silence("Booster.save") is None
    assert Budgets(5).of("Model.forward") == 5
    assert Budgets(None).of("Model.forward") is None


def test_calls_inside_of_calls_are_one() -> None:
    heart = Heart()
    heart.budgets = Budgets(1e-9)
    assert heart.is_idle
    heart.enter("Booster.execute_pipeline")
    assert not heart.is_idle  # also for other threads
    assert heart.overdue() is not None
    heart.excuse(heart.since - 60, heart.since - 1)  # before it began
    assert heart.overdue() is not None
    heart.excuse(heart.since, heart.since + 60)
    assert heart.overdue() is None
    with heart.untimed():
        assert heart.overdue() is None
    assert heart.overdue() is not None
    heart.leave()
    assert heart.overdue() is None
    assert heart.number == 1
    assert heart.words() == "code outside of shardwright"


class _Store:
    """What a job's keys hold."""

    world_size = 3

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def ask(self, name: str) -> str | None:
        return self.told.get(name)


def test_who_is_late_in_a_call_that_may_take_long_is_silent_twice() -> None:
    job, unheard = _Store(), dict[int, str | None]()

    def is_silent_still(*answered: int) -> bool:
        standings = {rank: at(rank) for rank in answered}
        return watchdog._is_silent_still(cast("Job", job), standings, unheard)

    job.told["beat/1"] = "7 0 in Booster.save (1)"
    assert not is_silent_still(0, 2)
    assert is_silent_still(0, 2)
    job.told["beat/1"] = "8 0 in Booster.save (1)"  # it wrote for long without letting go of Python's lock
    assert not is_silent_still(0, 2)
    assert not is_silent_still(0, 1)  # now rank 2
    assert is_silent_still(0, 1)
    assert not is_silent_still(0, 1, 2)
    job.told["left/1"] = "its script had ended"  # while another writes on
    assert not is_silent_still(0, 2)
    assert not is_silent_still(0, 2)


def test_an_optimizers_calls_are_timed_whoever_overrides_them() -> None:
    seen = []

    class Own(OptimizerWrapper):
        def clip_grad_by_value(self, clip_value: float) -> None:
            seen.append(shared_heart.call)
            super().clip_grad_by_value(clip_value)

        def _take_step(self) -> None:
            self.clip_grad_by_value(1.0)

    optimizer = Own(torch.optim.SGD([torch.ones(2, requires_grad=True)]))
    optimizer.clip_grad_by_value(1.0)
    optimizer.step()
    assert [call.rpartition(".")[2] for call in seen] == ["clip_grad_by_value", "step"]
    assert Budgets(5).of(seen[0]) == 5


def test_the_time_between_calls_has_a_budget_of_its_own() -> None:
    heart = Heart()
    heart.budgets = Budgets(None)
    heart.budgets.idle = 1e-9
    assert heart.overdue() is None  # before the first
    heart.enter("Booster.boost")
    heart.leave()
    assert heart.overdue() is None  # data may still be prepared
    assert heart.idle() == 0
    heart.enter("Booster.load")
    assert heart.overdue() is None
    assert heart.idle() == 0
    heart.leave()
    assert heart.overdue() is not None
    assert heart.budgets.why("") == "1e-09 s, as launch(idle_timeout=...) says"
    heart.excuse(heart.since, heart.since + 60)
    assert heart.overdue() is None
    heart.budgets.idle = None
    heart.since -= 600
    assert heart.idle() > 500
    assert heart.overdue() is None


@pytest.mark.parametrize("value", [0, -1, True, "soon"])
def test_a_limit_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"step_timeout=.* must be a positive number of seconds, 'auto'"):
        _step_limit(value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"idle_timeout=.* must be a positive number of seconds, or None"):
        _idle_limit(value)  # type: ignore[arg-type]


def test_a_store_that_ends_before_the_first_look_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is made then would be tried for a minute and a half, in which nobody hears of anything."""
    job = Job(dist.HashStore(), 0, 1)
    watch = Watch(job)
    monkeypatch.setattr(job, "new_client", lambda: pytest.fail("a new connection"))
    watch.start()
    try:
        assert job.wait_for(["beat/0"], 10)
    finally:
        watch.stop()
