"""Two jobs that save to one directory: the second is refused while the first lives, and no longer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_toys import Toy, check_resumed, trained

from shardwright.checkpoint.lock import NAME, DirectoryTaken, claim, require_free
from shardwright.logging import DistributedLogger

_OTHER = """
import sys, time
from pathlib import Path
from shardwright.checkpoint.lock import lock
lock(Path(sys.argv[1]), sys.argv[2] == "whole")
print("locked", flush=True)
time.sleep(100)
"""
_WITHOUT_LOCKS = """
import errno, fcntl
def refuse(*_):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.lockf = refuse
"""


class _Other:
    """Another job's process, which holds the lock of `target` until it is killed."""

    def __init__(self, target: Path, how: str, before: str = "", after: str = "") -> None:
        script = before + _OTHER.replace('print("locked"', after + 'print("locked"')
        command = [sys.executable, "-c", script, str(target), how]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "locked\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def test_a_directory_is_one_job_s_until_it_ends(tmp_path: Path) -> None:
    trained(1).save(tmp_path / "a" / "step-1", keep_last=2)
    (tmp_path / "b").mkdir()
    others = [_Other(tmp_path / "b" / "step-2", "whole"), _Other(tmp_path / "step-1", "one")]
    with pytest.raises(DirectoryTaken, match=rf"saves to {tmp_path / 'b'} \(process {others[0].process.pid} on"):
        trained(1).save(tmp_path / "b" / "step-1")
    with pytest.raises(DirectoryTaken, match="give this one a directory of its own"):
        trained(1).save(tmp_path / "step-1")
    with pytest.raises(DirectoryTaken):
        trained(1).save(tmp_path / "step-7", keep_last=1)
    trained(1).save(tmp_path / "step-7")  # beside what the other writes, and removes nothing
    trained(2).save(tmp_path / "a" / "step-2", keep_last=1)  # this job's own
    check_resumed(tmp_path / "a", (2,))
    for other in others:
        other.kill()
    trained(1).save(tmp_path / "b" / "step-1", keep_last=1)
    trained(1).save(tmp_path / "step-1")


def test_a_run_claims_its_directory_before_it_saves(tmp_path: Path) -> None:
    """Also against one that saves there, and looks at it without keeping it."""
    run = tmp_path / "run"
    require_free(run)
    assert not run.exists()
    claim(run)
    require_free(run)  # this job's own
    command = [sys.executable, "-c", _OTHER.replace("100", "0"), str(run / "step-1"), "one"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert f"saves to {run} (process {os.getpid()} on " in refused.stderr
    other = _Other(tmp_path / "all", "whole")
    for find in (require_free, claim):
        with pytest.raises(DirectoryTaken, match=f"process {other.process.pid} on"):
            find(tmp_path)
    other.kill()
    require_free(tmp_path)
    assert (tmp_path / NAME).read_bytes().strip() == b""
    _Other(tmp_path / "all", "whole").kill()  # nothing of the look has stayed


def test_a_run_whose_script_reads_the_file_of_locks(tmp_path: Path) -> None:
    """Which frees its locks, as copying the directory does: it keeps others out, and the copy is free."""
    run = tmp_path / "run"
    run.mkdir()
    copies = 'import shutil\nshutil.copytree(Path(sys.argv[1]).parent, sys.argv[1] + ".copy")\n'
    other = _Other(run / "all", "whole", after=copies)
    with pytest.raises(
        DirectoryTaken, match=rf"saves to {run} \(process {other.process.pid} on [^,]*, started at \d+\)"
    ):
        claim(run)
    with pytest.raises(DirectoryTaken):
        trained(1).save(run / "step-1", keep_last=1)
    claim(run / "all.copy")
    other.kill()
    claim(run)


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that the file names keeps others out while it runs, and no other that got its number later."""
    said: list[str] = []
    monkeypatch.setattr(DistributedLogger, "warning", lambda self, message, ranks=None: said.append(message))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.lockf", refuse)
    claim(tmp_path / "own")
    claim(tmp_path / "own")
    assert [line.partition(" cannot be locked (")[2] for line in said] == [
        "No locks available): nothing keeps a job of another machine from saving there"
    ]
    other = _Other(tmp_path / "all", "whole", before=_WITHOUT_LOCKS)
    with pytest.raises(DirectoryTaken, match=f"process {other.process.pid} on"):
        claim(tmp_path)
    file = tmp_path / NAME
    words = file.read_bytes()
    file.write_bytes(words.replace(b", file", b"0, file"))  # one that started at another time had the number
    claim(tmp_path)
    file.write_bytes(words)
    other.kill()
    claim(tmp_path)
    for garbage in (b"process 1 on", b"process 99999999999999 on x, started at 1", b"\xff" * 250, b""):
        file.write_bytes(garbage)
        claim(tmp_path)


def test_a_directory_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))  # which root never sees

    for name in ("open", "mkdir"):  # of the lock, which then keeps nobody out, and of the checkpoint
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(PermissionError):
        trained(1).save(tmp_path / "step-1")


def test_a_directory_that_vanishes_is_made_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(1).save(run / "step-1", keep_last=1)
    for child in (*(run / "step-1").iterdir(), run / NAME):
        child.unlink()
    (run / "step-1").rmdir()
    run.rmdir()
    trained(2).save(run / "step-2", keep_last=1)
    assert Toy().load(run)["step"] == 2
    with pytest.raises(subprocess.CalledProcessError):
        subprocess.run(
            [sys.executable, "-c", _OTHER.replace("100", "0"), str(run / "x"), "one"], check=True, capture_output=True
        )


def test_a_file_of_locks_that_cannot_be_opened(tmp_path: Path) -> None:
    """Another user's, or of a file system that refuses it, or a pipe, keeps nobody from saving; a link is not
    followed.
    """
    (tmp_path / "other" / NAME).mkdir(parents=True)
    (tmp_path / "pipe").mkdir()
    os.mkfifo(tmp_path / "pipe" / NAME)
    for run in (tmp_path / "other", tmp_path / "pipe"):
        claim(run)
        for step in (1, 2):
            trained(step).save(run / f"step-{step}")
        check_resumed(run, (2,))
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(ValueError, match="is a link, which saves do not follow: remove it"):
        trained(1).save(tmp_path / "link" / "step-1")
    assert not (tmp_path / "victim").exists()
