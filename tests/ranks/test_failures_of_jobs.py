"""What a whole job prints when a rank fails, and how its processes end: under torchrun, and under launchers that
only start processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.reliability.processes import Process, environment, start

SCRIPT = str(Path(__file__).with_name("failing_script.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", SCRIPT]


def torchrun(how: str, interrupt: bool = False) -> list[str]:
    """What torchrun and its ranks print, together."""
    process = subprocess.Popen(
        [*TORCHRUN, how],
        env=environment(TIMEOUT="6" if how == "sleep" else "60"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    printed = ""
    if interrupt:
        assert process.stdout is not None
        while "READY" not in printed:
            printed += process.stdout.readline()
        time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
    printed += process.communicate(timeout=110)[0]
    assert process.returncode != 0
    lines = printed.splitlines()
    assert len(lines) < 40, printed
    assert "frame #" not in printed
    return lines


def test_torchrun_ends_with_the_root_cause() -> None:
    lines = torchrun("raise")
    root = "\n".join(lines[lines.index("Root Cause (first observed failure):") :])
    assert "rank      : 3 (local_rank: 3)" in root
    assert (
        "rank 3 (dp=1, pp=1, tp=0) failed first in step 2 of execute_pipeline, action 1F0 (stage 1, chunk "
        "0, microbatch 0)"
    ) in root
    assert "ValueError: bad batch" in root
    assert re.search(r'failing_script.py:\d+ criterion: raise ValueError\("bad batch"\)', root), root
    assert lines[-1].startswith("====")
    assert "<NO_OTHER_FAILURES>" in "\n".join(lines)
    [name] = [line.split(": ", 1)[1] for line in lines if line.strip().startswith("error_file:")]
    assert "in criterion" in Path(name).with_name("traceback.txt").read_text()


@pytest.mark.sweep
def test_torchrun_after_ctrl_c_says_so_once() -> None:
    lines = torchrun("interrupt", interrupt=True)
    assert sum("Interrupted" in line for line in lines) == 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "rank 2 died without a word (killed?)"),
        ("exit", "rank 2 called sys.exit(3) at failing_script.py"),
        ("return", "rank 2 left: its script had ended while rank"),
        ("loop", "rank 2 failed first: KeyError: 'in the loop'"),
        ("interrupted", "rank 2 was interrupted"),
        ("worker", "rank 2 failed first: OSError: bad file (in DataLoader worker process 0)"),
        ("sleep", "timeout: rank 2 did not come"),
    ],
)
def test_torchrun_names_the_rank_that_went(how: str, words: str) -> None:
    assert any(words in line for line in torchrun(how))


def processes(how: str, tmp_path: Path, **extra: str) -> tuple[list[int | None], list[str], float]:
    """Exit codes, and what each rank printed, of ranks that srun might have started; and the seconds from the first
    end to the last.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started: list[Process] = []
    for rank in range(3):
        variables = environment(
            SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NTASKS="3", MASTER_PORT=port, **extra
        )
        variables["SLURM_NODELIST"] = "localhost"
        started.append(start([SCRIPT, how], variables, tmp_path / str(rank)))
    ends: list[float] = []
    while any(process.code() is None for process in started):
        if len(ends) < sum(process.code() is not None for process in started):
            ends.append(time.monotonic())
        time.sleep(0.02)
    return (
        [process.code() for process in started],
        [(tmp_path / str(rank)).read_text() for rank in range(3)],
        time.monotonic() - ends[0] if ends else 0.0,  # all at once
    )


def test_the_others_say_which_rank_died(tmp_path: Path) -> None:
    codes, printed, took = processes("kill", tmp_path)
    assert codes == [1, 1, -signal.SIGKILL]
    for text in printed[:2]:
        assert "rank 2 died without a word (killed?)" in text
        assert "Connection closed" not in text
        assert len(text.splitlines()) <= 2, text
    assert took < 10


def test_what_is_no_failure_fails_nobody(tmp_path: Path) -> None:
    codes, printed, _ = processes("live", tmp_path)
    assert codes == [0, 0, 0], printed


def test_a_timeout_binds_and_names_the_sleeping_rank(tmp_path: Path) -> None:
    codes, printed, took = processes("sleep", tmp_path, TIMEOUT="4")
    assert all(code == 1 for code in codes)
    story = next(text for text in printed if text.startswith("timeout: ") or "\ntimeout: " in text)
    lines = story[story.index("timeout: ") :].splitlines()
    assert lines[0] == "timeout: rank 2 did not come"
    assert lines[1] == "rank 2 was in"
    assert any("time.sleep(300)" in line for line in lines)
    assert any(line.startswith("rank 0, 1 waited in") for line in lines)
    assert any("dist.all_reduce(total)" in line for line in lines)
    assert took < 12


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "words", "code"), [("exit", "called sys.exit(3)", 3), ("return", "its script had ended", 0)]
)
def test_the_others_say_which_rank_went(how: str, words: str, code: int, tmp_path: Path) -> None:
    codes, printed, _ = processes(how, tmp_path)
    assert codes == [1, 1, code]
    for text in printed[:2]:
        assert f"rank 2 {words}" in text or f"rank 2 left: {words}" in text


def test_stories_fit_into_the_store() -> None:
    from shardwright.cluster.failure import Failure, failure_of

    def deep(level: int) -> None:
        if level == 0:
            raise RuntimeError("x" * 3000)
        deep(level - 1)

    try:
        deep(300)
    except RuntimeError as error:
        failure = failure_of(error, 1, "dp=0", "step 2")
    again = Failure.from_json(failure.to_json())
    assert again == failure
    assert len(again.traceback) < 25_000
    assert len(again.frames) <= 4
    assert json.loads(failure.to_json())["kind"] == "raised"
