"""Jobs that are ended and started again give the weights of one that never was, with real processes and signals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.reliability.processes import PATIENCE, Ended, run

SCRIPT = str(Path(__file__).with_name("elastic_script.py"))
STEPS = 8


def train(layout: str, directory: Path, world: int = 2, **fault: str) -> Ended:
    directory.mkdir(exist_ok=True)
    return run([SCRIPT, layout, str(directory)], directory, world, STEP_TIMEOUT=str(3 * PATIENCE), **fault)


def final(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "final.safetensors")


def steps(directory: Path) -> list[int]:
    return [int(line.split()[0]) for line in (directory / "steps").read_text().splitlines()]


def never_hit(layout: str, directory: Path) -> dict[str, torch.Tensor]:
    ended = train(layout, directory)
    assert ended.codes == [0, 0], ended.printed
    assert steps(directory) == list(range(1, STEPS + 1))
    return final(directory)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("layout", "fault", "again", "taken"),
    [
        ("pp", "kill", 2, [1, 2, 3, 4, 5, 6, 7, 8]),  # at step 5, behind the save of step 4
        ("zero2", "terminate", 2, [1, 2, 3, 4, 5, 6, 7, 8]),  # step 5 is saved
        ("dp", "stop", 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("tp", "kill", 1, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("dp", "terminate", 4, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("searched", "kill", 4, [1, 2, 3, 4, 5, 6, 7, 8]),  # the planner chooses the layout of both
    ],
)
def test_a_job_that_was_ended_goes_on(layout: str, fault: str, again: int, taken: list[int], tmp_path: Path) -> None:
    expected = never_hit(layout, tmp_path / "well")
    hit = tmp_path / "hit"
    ended = train(layout, hit, FAULT=fault, AT="5", RANK_HIT="1")
    wanted = {"kill": [1, -9], "stop": [79, -9], "terminate": [143, 143]}[fault]
    assert ended.codes == wanted, ended.printed
    resumed = train(layout, hit, again)
    assert resumed.codes == [0] * again, resumed.printed
    assert steps(hit) == taken
    for name, weight in final(hit).items():
        if again == 2:
            assert torch.equal(weight, expected[name]), name
        else:
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)


@pytest.mark.sweep
def test_a_machine_that_is_taken_away_every_other_step(tmp_path: Path) -> None:
    expected = never_hit("dp", tmp_path / "well")
    hit = tmp_path / "hit"
    codes = []
    while not (hit / "final.safetensors").exists() and len(codes) < STEPS:
        codes.append(train("dp", hit, FAULT="terminate", EVERY="2").codes)
    # a signal that comes in the last step may find the other rank behind it already
    assert codes in ([[143, 143]] * 3 + [[0, 0]], [[143, 143]] * 4 + [[0, 0]])
    assert all(torch.equal(weight, expected[name]) for name, weight in final(hit).items())
