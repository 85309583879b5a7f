"""Jobs that torchrun starts, ends and starts again: they come to the weights of one that was never hit. The agent is
the real one; see `agent.py`. What it says of faults: test_fault_matrix.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.reliability.agent import Launched, torchrun
from tests.reliability.processes import PATIENCE

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
STEPS = 8


def train(
    layout: str, directory: Path, meanwhile: Callable[[int], bool] = bool, restarts: int = 0, **fault: str
) -> Launched:
    variables = {"STEP_TIMEOUT": str(3 * PATIENCE), **fault}
    return torchrun([SCRIPT, layout, str(directory)], directory, 2, restarts, meanwhile=meanwhile, **variables)


def final(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "final.safetensors")


def steps(directory: Path) -> list[int]:
    file = directory / "steps"
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "layout", ["dp", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("pp", "tp", "zero2"))]
)
def test_a_rank_that_is_killed_is_started_again_with_the_others(layout: str, rank: int, tmp_path: Path) -> None:
    well = train(layout, tmp_path / "well")
    assert well.code == 0, well.printed
    hit = train(layout, tmp_path / "hit", restarts=2, FAULT="kill", AT="5", RANK_HIT=str(rank))
    assert hit.code == 0, hit.printed
    assert steps(tmp_path / "hit") == list(range(1, STEPS + 1))  # step 5 counts when it is through
    expected = final(tmp_path / "well")
    assert all(torch.equal(weight, expected[name]) for name, weight in final(tmp_path / "hit").items())


@pytest.mark.sweep
def test_a_rank_that_is_stopped_is_named_and_the_job_goes_on(tmp_path: Path) -> None:
    hit = train("dp", tmp_path / "hit", restarts=1, FAULT="stop", AT="5", RANK_HIT="1")
    assert hit.code == 0, hit.printed
    assert steps(tmp_path / "hit") == list(range(1, STEPS + 1))


def at_step_3(number: signal.Signals, directory: Path) -> Callable[[int], bool]:
    """Sends the agent this signal when its ranks have come so far; whether that was now."""

    def hit(agent: int) -> bool:
        if len(steps(directory)) < 3:
            return False
        os.kill(agent, number)
        (directory / "hit").touch()
        return True

    return hit


def test_a_job_that_is_told_to_end_saves_and_ends_in_time(tmp_path: Path) -> None:
    """SIGTERM to torchrun, which gives its ranks 30 seconds."""
    ended = train("dp", tmp_path, at_step_3(signal.SIGTERM, tmp_path), FAULT="slow")
    assert "is saved, all ranks end" in ended.printed, ended.printed
    assert "forcefully exiting" not in ended.printed, ended.printed
    assert ended.seconds < 5 * PATIENCE
    done = steps(tmp_path)
    assert done == list(range(1, len(done) + 1))
    assert len(done) < STEPS
    again = train("dp", tmp_path)
    assert again.code == 0, again.printed
    assert steps(tmp_path) == list(range(1, STEPS + 1))


@pytest.mark.sweep
def test_a_job_whose_agent_is_stopped_ends(tmp_path: Path) -> None:
    """SIGSTOP to torchrun, which serves the store: ranks meet in it when they begin to save."""
    ended = train("dp", tmp_path, at_step_3(signal.SIGSTOP, tmp_path), FAULT="slow")
    assert ended.code == -signal.SIGKILL
    assert "The job's store does not answer: " in ended.printed, ended.printed
    assert "which serves it, was stopped" in ended.printed, ended.printed
    assert ended.seconds < 8 * PATIENCE
    again = train("dp", tmp_path)
    assert again.code == 0, again.printed
    assert steps(tmp_path)[-1] == STEPS


def test_a_second_job_in_the_directory_of_a_first_is_refused(tmp_path: Path) -> None:
    told: list[str] = []

    def start_another(agent: int) -> bool:
        if not steps(tmp_path):
            return False
        told.append(train("dp", tmp_path, restarts=0, OUTPUT="second").printed)
        return True

    first = train("dp", tmp_path, start_another, FAULT="slow")
    assert first.code == 0, first.printed
    (printed,) = told
    assert "DirectoryTaken: another job that is still running saves to" in printed
    assert "elastic.run begins" not in printed
    assert steps(tmp_path) == list(range(1, STEPS + 1))
