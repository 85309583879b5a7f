"""The demo on ranks: what it leaves, that the number of ranks does not matter, and what happens when a rank fails."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(*command: str, cwd: Path, timeout: int = 110, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, **variables}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout
    )


def demo(cwd: Path, *options: str) -> str:
    done = run("-m", "shardwright.cli", "demo", "--device", "cpu", "--batch-size", "8", *options, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(results: Path) -> list[float]:
    lines = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line] + [
        line["eval_loss"] for line in lines if "eval_loss" in line
    ]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, demo(folder, "--steps", "12", "--world-size", "2")


def test_it_leaves_what_it_says(on_two_ranks: tuple[Path, str]) -> None:
    folder, printed = on_two_ranks
    results = folder / "demo-results"
    for name in re.findall(r"demo-results/(\S+)", printed):
        assert (results / name).exists(), name
    assert json.loads((results / "layout.json").read_text())["ranks"] == 2
    report = (results / "report.html").read_text()
    assert "<svg" in report
    assert "shardwright demo --world-size=2 --steps=12 --batch-size=8" in report
    assert f"<td>torch</td><td>{importlib.metadata.version('torch')}</td>" in report
    assert not re.search(r"(src|href)=", report), "the report must need no other file"


def test_the_loss_falls(on_two_ranks: tuple[Path, str]) -> None:
    seen = losses(on_two_ranks[0] / "demo-results")
    assert len(seen) == 12 + 13
    assert seen[-1] < seen[12] - 0.5


def test_what_the_documents_do_with_the_results_works(on_two_ranks: tuple[Path, str]) -> None:
    text = (ROOT / "docs" / "getting_started.md").read_text()
    code = re.findall(r"^```python after=demo\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert code
    for block in code:
        done = run("-c", block, cwd=on_two_ranks[0])
        assert done.returncode == 0, done.stderr


def test_one_rank_gives_the_same_losses(on_two_ranks: tuple[Path, str], tmp_path: Path) -> None:
    demo(tmp_path, "--steps", "12", "--world-size", "1", "--output", "alone")
    assert losses(tmp_path / "alone") == pytest.approx(losses(on_two_ranks[0] / "demo-results"), rel=1e-4)


FAILING_MODULE = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise RuntimeError("the disk is on fire")
    time.sleep(100)

main()
"""


def test_a_failing_rank_stops_all_and_its_traceback_is_last(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING_MODULE)
    code = "import sys; from shardwright.cli.relaunch import relaunch; sys.exit(relaunch([], 2, module='failing'))"
    done = run("-c", code, cwd=tmp_path, timeout=60, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    assert "Rank 1 failed first" in done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: the disk is on fire")
