"""`launch(deterministic=True)`: what it sets and refuses; the same bits in fresh processes, also when played again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shardwright.cluster import determinism
from tests.reliability.deterministic_script import LAYOUTS, SAVED
from tests.reliability.processes import run

SCRIPT = str(Path(__file__).with_name("deterministic_script.py"))
LAST = 6
DEFAULT = "ZeRO 3, bf16"


def told(directory: Path, layout: str, first: int = 0) -> list[list[str]]:
    """Digests by rank, of the losses of the steps behind `first` and of the weights at the end."""
    directory.mkdir(exist_ok=True)
    ranks = LAYOUTS[layout].ranks
    ended = run([SCRIPT, str(directory), layout, str(first), str(LAST)], directory, world=ranks)
    assert ended.codes == [0] * ranks, ended.printed
    return [(directory / f"told-{rank}").read_text().splitlines() for rank in range(ranks)]


@pytest.mark.timeout(1800)  # three starts of up to four processes
@pytest.mark.parametrize(
    "layout", [name if name == DEFAULT else pytest.param(name, marks=pytest.mark.sweep) for name in LAYOUTS]
)
def test_two_runs_and_a_replay_are_the_same_bits(layout: str, tmp_path: Path) -> None:
    """With dropout. What is played again begins at a checkpoint, in new processes, too."""
    one, other = told(tmp_path / "one", layout), told(tmp_path / "other", layout)
    assert one == other
    losses = [line.split()[-1] for line in one[-1] if line.startswith("loss")]
    assert len(set(losses)) == LAST  # it trains
    again = told(tmp_path / "one", layout, SAVED)
    assert again == [lines[SAVED:] for lines in one]


@pytest.fixture
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> object:
    """What is set is undone."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn


def test_what_is_set(as_it_was: object) -> None:
    determinism.check_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    determinism.check_deterministic(True)
    determinism.make_deterministic()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


def test_what_cannot_be_had(as_it_was: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="deterministic=1 must be True or False"):
        determinism.check_deterministic(1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="deterministic=True after CUDA has been used"):
        determinism.check_deterministic(True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    determinism.check_deterministic(True)
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    with pytest.raises(ValueError, match="FLASH_ATTENTION_DETERMINISTIC='0': leave the variable out"):
        determinism.check_deterministic(True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ValueError, match="cuBLAS is deterministic with :4096:8 or :16:8 only"):
        determinism.check_deterministic(True)
