"""`elastic.run` in one process: it goes on where it was, saves when it is told to end, and outlives its disk. With many
processes: tests/reliability/test_elastic_jobs.py.
"""

from __future__ import annotations

import copy
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwright import Booster, elastic
from shardwright.checkpoint.lock import NAME
from shardwright.files import disk
from shardwright.files.errors import CheckpointNotFound
from shardwright.interface import NonFiniteLoss
from shardwright.logging import DistributedLogger
from shardwright.plugins import LowLevelZeroPlugin

pytestmark = pytest.mark.usefixtures("no_launcher")


class Training:
    """Six steps of a linear layer; `after(step)` is called behind each."""

    def __init__(self, after: Any = None, bad: Any = ()) -> None:
        self.after, self.steps, self.weights = after, list[int](), torch.empty(0)
        self.bad, self.seen = (
            bad,
            list[torch.Tensor](),
        )  # batches that come to nothing, by their number, and all batches
        self.first: Any = None  # the layer before it is trained
        self.own: Path | None = None  # where the script itself saves at its end

    def __call__(self, run: elastic.Run) -> str:
        plugin = LowLevelZeroPlugin(stage=1, precision="fp32")
        booster, model = Booster(plugin=plugin, on_nan="stop"), torch.nn.Linear(3, 2)
        samples = torch.arange(36.0).view(12, 3) / 36
        self.first = self.first or copy.deepcopy(model)
        loader = plugin.prepare_dataloader(list(samples), batch_size=4, shuffle=True, seed=5)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer, _, loader, _ = booster.boost(model, optimizer, None, loader)
        run.resume(booster, model, optimizer, dataloader=loader)
        while run.step < 6:
            for batch in loader:
                self.seen.append(batch)
                loss = model(batch).square().sum()
                booster.backward(loss * (float("nan") if len(self.seen) in self.bad else 1.0), optimizer)
                optimizer.step()
                optimizer.zero_grad()
                self.steps.append(run.step + 1)
                if self.after is not None:
                    self.after(run.step + 1)
                run.completed()
                if run.step == 6:
                    break
        if self.own is not None:
            booster.save(self.own, model=model)
        self.weights = torch.cat([param.detach().flatten() for param in model.unwrap().parameters()])
        return "done"


def run(training: Training, directory: Path, **options: Any) -> Any:
    try:
        return elastic.run(training, directory, seed=1, **options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != NAME)


def test_a_run_that_is_told_to_end_goes_on(tmp_path: Path) -> None:
    well = Training()
    assert run(well, tmp_path / "well", save_every=2) == "done"
    assert saved(tmp_path / "well") == ["step-4", "step-6"]

    def end(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)

    hit = Training(end)
    with pytest.raises(SystemExit) as ended:
        run(hit, tmp_path / "hit", save_every=None, keep_last=None)
    assert ended.value.code == elastic.INTERRUPTED
    assert saved(tmp_path / "hit") == ["step-4"]
    again = Training()
    run(again, tmp_path / "hit", save_every=None, keep_last=None)
    assert (hit.steps, again.steps) == ([1, 2, 3, 4], [5, 6])
    assert torch.equal(again.weights, well.weights)


def test_a_batch_that_fails_is_left_out(tmp_path: Path) -> None:
    """From the last checkpoint on, without the data of the steps since, and not more often than was asked for."""
    well = Training()
    run(well, tmp_path / "well", save_every=2)
    hit = Training(bad=(4,))
    assert run(hit, tmp_path / "hit", save_every=2, rollbacks=1) == "done"
    assert hit.steps == [1, 2, 3, 3, 4, 5, 6]
    assert all(torch.equal(one, other) for one, other in zip(hit.seen, well.seen, strict=False))
    optimizer = torch.optim.AdamW(hit.first.parameters(), lr=0.1)
    for number in (0, 1, 4, 5, 6, 7):  # which plain torch is trained on
        optimizer.zero_grad()
        hit.first(hit.seen[number]).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(torch.cat([param.detach().flatten() for param in hit.first.parameters()]), hit.weights)
    lost = Training(bad=(4, 7))
    with pytest.raises(NonFiniteLoss, match=r"rollbacks=1 has been used up$"):
        run(lost, tmp_path / "lost", save_every=2, rollbacks=1)
    assert lost.steps == [1, 2, 3, 3, 4]
    with pytest.raises(NonFiniteLoss, match=r"rollbacks=3 had no checkpoint to go back to: save earlier$"):
        run(Training(bad=(2,)), tmp_path / "nothing", rollbacks=3)


def test_a_full_disk_costs_a_checkpoint(tmp_path: Path) -> None:
    def fill(step: int) -> None:
        def probe(operation: str, path: Path) -> None:
            if operation == "half-way write":
                raise OSError(errno.ENOSPC, "No space left on device", str(path))

        disk.set_probe(probe if step in (3, 4) else None)

    training = Training(fill)
    run(training, tmp_path, save_every=2, keep_last=1)
    assert training.steps == [1, 2, 3, 4, 5, 6]
    assert saved(tmp_path) == ["step-6"]
    disk.set_probe(None)
    with pytest.raises(OSError, match="No space left"):
        run(Training(lambda _: fill(3)), tmp_path / "raise", save_every=4, on_save_error="raise")


@pytest.mark.parametrize("stays_full", [False, True])
def test_a_save_that_failed_before_does_not_cost_the_one_at_the_end(
    tmp_path: Path, stays_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of by the next call, which is not to lose its own step by it."""
    said: list[str] = []
    monkeypatch.setattr(DistributedLogger, "warning", lambda self, message, ranks=None: said.append(message))

    def fail(operation: str, path: Path) -> None:
        if operation == "half-way write" and (stays_full or "step-2" in str(path)):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def end(step: int) -> None:
        disk.set_probe(fail)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        run(Training(end), tmp_path, save_every=2, keep_last=None)
    assert saved(tmp_path) == ([] if stays_full else ["step-4"])
    costs = [line for line in said if "a checkpoint could not be written and training goes on without it" in line]
    assert [line.split(":")[0] for line in costs] == (["step 2", "step 4"] if stays_full else ["step 2"])
    assert f"step 4 {'could not be' if stays_full else 'is'} saved" in said[-1]


def test_a_save_that_failed_is_not_told_of_by_a_call_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(DistributedLogger, "warning", lambda self, message, ranks=None: said.append(message))

    def full(operation: str, path: Path) -> None:
        if operation == "half-way write" and "step-" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    disk.set_probe(full)
    training = Training()
    training.own = tmp_path / "own"
    assert run(training, tmp_path / "run", save_every=6) == "done"
    assert saved(tmp_path) == ["own", "run"]
    assert [line.partition(" and training goes on without it: ")[0] for line in said] == [
        "step 6: a checkpoint could not be written"
    ]
    with pytest.raises(OSError, match="No space left"):
        run(training, tmp_path / "raise", save_every=6, on_save_error="raise")


def test_children_end_when_they_are_told_to(tmp_path: Path) -> None:
    """Those of a `multiprocessing.Pool` are waited for when it ends."""
    codes = []

    def fork(step: int) -> None:
        if step == 1:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
                child.start()
                assert child.pid is not None
                os.kill(child.pid, number)
                child.join(50)
                codes.append(child.exitcode)
                child.kill()

    training = Training(fork)
    run(training, tmp_path, save_every=None)
    assert codes == [-signal.SIGTERM, -signal.SIGUSR1]
    assert training.steps == [1, 2, 3, 4, 5, 6]


def test_nothing_begins_anew_over_what_is_damaged(tmp_path: Path) -> None:
    run(Training(), tmp_path, save_every=3)
    for file in tmp_path.glob("step-*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointNotFound, match=r"(?s)step-6.*does not begin anew where checkpoints were finished"):
        run(Training(), tmp_path)
    assert saved(tmp_path) == ["step-3", "step-6"]


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollbacks=-1 must be at least 0"):
        run(Training(), tmp_path, rollbacks=-1)
    for options, words in (
        ({"on_save_error": "ignore"}, "on_save_error='ignore' is not one of 'warn', 'raise'"),
        ({"save_every": 0}, "save_every=0 must be at least 1, or None"),
        ({"keep_last": 0}, "keep_last=0 must be at least 1, or None"),
    ):
        with pytest.raises(ValueError, match=words):
            elastic.run(Training(), tmp_path, **options)
    with pytest.raises(ValueError, match=r"call run.resume\(booster, model, optimizer, ...\)"):
        run(lambda it: it.completed(), tmp_path)  # type: ignore[arg-type]


def test_ranks_that_a_signal_ends_run_their_exit_handlers_and_take_nothing_apart() -> None:
    script = """
import atexit, sys
atexit.register(print, "first")
from shardwright.cluster import ending
class Slow:
    def __del__(self):
        print("taken apart")
slow = Slow()
atexit.register(ending.leave_early, 143)
atexit.register(print, "last")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (143, ["last", "first"], "")
