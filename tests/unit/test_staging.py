"""Two jobs that save weights to one path: one is refused while the other writes, and none finds what is left of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwright import Booster
from shardwright.checkpoint.lock import DirectoryTaken
from shardwright.checkpoint.staging import Staging
from shardwright.files import disk

_OTHER = """
import sys, time
from pathlib import Path
from shardwright.checkpoint.staging import Staging
held = Staging(Path(sys.argv[1]), Path("weights"))
(Path(sys.argv[1]) / "model.safetensors").touch()
print("holds", flush=True)
time.sleep(100)
"""


def test_one_save_at_a_time(tmp_path: Path) -> None:
    fresh, target = tmp_path / ".weights.new", tmp_path / "weights"
    other = subprocess.Popen([sys.executable, "-c", _OTHER, str(fresh)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "holds\n"
    for _ in range(2):
        with pytest.raises(DirectoryTaken, match=f"another save to {target} is under way"):
            Staging(fresh, target)
    assert (fresh / "model.safetensors").exists()
    other.kill()
    other.wait()
    mine = Staging(fresh, target)
    assert not list(fresh.iterdir())
    with pytest.raises(DirectoryTaken):  # of another Booster of this process
        Staging(fresh, target)
    child = os.fork()
    if child == 0:  # a worker of a loader that outlives the save
        os.read(os.pipe()[0], 1)
    try:
        mine.release()
        Staging(fresh, target).release()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_one_that_another_job_puts_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its making and its lock another job may take it for what a crash has left."""
    fresh, target = tmp_path / ".weights.new", tmp_path / "weights"

    def open_after_another(path: Path, flags: int) -> int:
        descriptor = os_open(path, flags)
        fresh.rmdir()
        fresh.mkdir()
        return descriptor

    os_open = os.open
    monkeypatch.setattr(os, "open", open_after_another)
    with pytest.raises(DirectoryTaken):
        Staging(fresh, target)


def test_a_save_that_cannot_begin_keeps_nobody_out(tmp_path: Path) -> None:
    booster, layer = Booster(device="cpu"), torch.nn.Linear(2, 2)
    model, *_ = booster.boost(layer)

    def full(operation: str, path: Path) -> None:
        if operation == "mkdir" and path.name == "staging":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    disk.set_probe(full)
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="No space left on device"):
                booster.save_model(model, tmp_path / "weights")
    finally:
        disk.set_probe(None)
    booster.save_model(model, tmp_path / "weights")
    assert (tmp_path / "weights" / "model.safetensors").exists()
