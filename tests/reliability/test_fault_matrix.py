"""The fault matrix, with real processes. Two cases in the default suite; all of them, and the page that they are
printed on:

    python -m pytest tests/reliability -m "sweep or not sweep"
    python -m tests.reliability.write_docs
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.agent import torchrun
from tests.reliability.cases import BOOST, CASES, LIMIT, STEP, Case
from tests.reliability.processes import PATIENCE, Ended, run

SCRIPT = str(Path(__file__).with_name("faulty_script.py"))
STEPS = 8  # of the script
ALWAYS = ("sleep-pp2-rank1",)


def play(case: Case, directory: Path) -> Ended:
    arguments = [SCRIPT, case.layout, case.fault, str(case.rank), str(STEP), str(directory)]
    limit = str(LIMIT * PATIENCE)
    if case.by_torchrun:
        launched = torchrun(arguments, directory, STEP_TIMEOUT=limit)
        return Ended([launched.code], [launched.printed], launched.seconds)
    return run(arguments, directory, len(case.codes), STEP_TIMEOUT=limit)


def check(case: Case, ended: Ended, directory: Path) -> None:
    story = "\n--\n".join(ended.printed)
    assert tuple(ended.codes) == case.codes, story
    assert any(case.words in text for text in ended.printed), story
    assert ended.seconds < case.seconds * PATIENCE, story
    steps = [int(path.read_text()) for path in directory.glob("rank-*")] or [0]
    assert (max(steps) == STEPS) == case.goes_on, story
    worker = directory / "worker"  # of a loader, which must not outlive its rank
    if worker.exists():
        state = Path(f"/proc/{worker.read_text()}/stat")
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX", "it runs on"
    if not case.goes_on and case.seconds != BOOST:
        assert STEP - 1 <= max(steps) <= STEP + 1, story


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in ALWAYS else pytest.mark.sweep) for case in CASES],
)
def test_fault(case: Case, tmp_path: Path) -> None:
    check(case, play(case, tmp_path), tmp_path)
