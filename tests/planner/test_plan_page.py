"""`shardwright plan --html`: the page has the figures of `--json`, on the time scale of the schedule."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardwright.cli.main import main
from shardwright.cli.plan_page import command
from shardwright.cli.plan_page.columns import columns, fewer_spans
from shardwright.cli.plan_page.memory import grouped
from shardwright.cli.plan_page.page import DRAWN, chosen
from shardwright.pipeline.planning.actions import Action
from shardwright.pipeline.timeline import MeasuredSpan
from shardwright.planner.curves import Curve, Stretch, by_holder
from shardwright.planner.replay import Job, Peak, replay
from shardwright.testing.peaks import Case


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake job leaves LOCAL_RANK behind, as any launch does."""
    monkeypatch.setenv("LOCAL_RANK", "0")


def figures(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_has_the_figures_of_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "step.html"
    asked = "plan --model llama-tiny --world-size 2 --pp-size 2 --batch-size 10 --seq-len 32 --num-microbatches 5"
    assert main([*asked.split(), "--json", "--html", str(path), "--gpu-memory", "0.01"]) == 0
    printed, told = capsys.readouterr()
    page, said = path.read_text(encoding="utf-8"), json.loads(printed)
    found = figures(page)
    assert told == f"wrote {path}\n"
    assert {key: found[key] for key in said} == said, "the same keys, and to the byte"
    assert not re.search(r"""(src|href)=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)""", page), "it loads nothing"
    for curve, peak in zip(found["curves"], said["peaks"], strict=True):
        assert curve["pipeline_rank"] == peak["pipeline_rank"]
        own = curve["columns"]
        top = max(own, key=lambda column: column["bytes"])
        assert top["bytes"] == peak["peak"]
        assert top["during"] == peak["reached_in"]
        assert sum(top["held"]) == pytest.approx(peak["peak"], abs=len(peak["held"]))  # each is rounded
        assert own[0]["start"] == 0.0
        assert own[-1]["end"] == pytest.approx(found["time"]["seconds"])
        for one, other in pairwise(own):
            assert one["end"] == pytest.approx(other["start"]), "no time is left out"
    assert [peak["fullest"] for peak in said["peaks"]].index(True) == 0
    assert page.index("rank 0</b><span") < page.index("rank 1</b>"), "and the fullest rank is marked"
    assert page.count('<svg class="memory"') == 2
    assert page.count("<figcaption>") == page.count("</figcaption>") == 2
    assert all(f"<title>{action}:" in page for action in ("0F0", "0B4", "1F4", "1B0"))


def test_paths_that_cannot_be_written_are_told_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["plan", "--model", "llama-tiny", "--world-size", "1", "--batch-size", "2", "--seq-len", "8"]
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "nowhere" / "a.html", "No such file or directory"),
        ("/dev/full", "No space left on device"),
    ):
        assert main([*asked, "--html", str(path)]) == 1
        said = capsys.readouterr()
        assert said.err.startswith(f"shardwright plan: --html {path} cannot be written ({why}); ")
        assert not said.out, "before anything was computed"

    def refused(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ValueError, match="Permission denied"):
        command.refuse(tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def test_a_page_needs_a_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--model", "llama-tiny", "--world-size", "1", "--html", str(tmp_path / "a.html")]) == 1
    assert "--html replays a training step: it needs --batch-size" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_curves_of_whole_replays_reach_their_peaks() -> None:
    case = Case("bert-masked-lm", {"precision": "fp32", "num_microbatches": 2}, layers=2)
    job = Job(case.plugin, case.lazy_model, case.optimizer, case.batch())
    curves: list[Curve] = []
    (found,) = replay(job, 1, curves)
    assert [found] == replay(job, 1)
    (curve,) = curves
    top = max(curve.stretches, key=lambda stretch: stretch.most)
    assert top.most == found.most
    assert top.held == found.held
    assert curve.kept == found.kept
    assert [stretch.name for stretch in curve.stretches][1:5] == ["0F0", "0B0", "0F1", "0B1"]


def test_holders_sum_up_to_what_is_held() -> None:
    assert by_holder(("a", "b", "c", "a"), (4, -3, 5, 6)) == (("a", 7), ("c", 5))
    assert by_holder(("a", "b"), (4.4, 0.0)) == (("a", 4),)


def _stretch(name: str, most: int, left: int) -> Stretch:
    return Stretch(name, most, (("activations of X", most),), (("activations of X", left),))


def test_what_takes_no_time_stands_in_the_pause_before() -> None:
    spans = [MeasuredSpan(Action.parse(name), at, at, at + 1) for name, at in (("0F0", 0.0), ("0B0", 3.0))]
    names = (
        ("before", 9, 9),
        ("0F0", 20, 15),
        ("0SEND_F0", 17, 15),
        ("0B0", 30, 9),
        ("0REDUCE", 40, 9),
        ("step", 25, 9),
    )
    found = columns(Curve(0, 9, [_stretch(*each) for each in names]), spans, computed=5.0, seconds=6.0)
    assert [(start, end, stretch.name) for start, end, stretch in found] == [
        (0.0, 0.0, "before"),
        (0.0, 1.0, "0F0"),
        (1.0, 3.0, "0SEND_F0"),
        (3.0, 4.0, "0B0"),
        (4.0, 5.0, "0REDUCE"),
        (5.0, 6.0, "step"),
    ]
    alone = [_stretch(*each) for each in names if each[0] in ("0F0", "0B0")]
    found = columns(Curve(0, 9, alone), spans, computed=5.0, seconds=6.0)
    assert [(start, end, stretch.name, stretch.most) for start, end, stretch in found] == [
        (0.0, 1.0, "0F0", 20),
        (1.0, 3.0, "waiting", 15),
        (3.0, 4.0, "0B0", 30),
        (4.0, 6.0, "waiting", 9),
    ]


def test_many_ranks_and_actions_are_summarised() -> None:
    peaks = [Peak(rank, 1, 100 + (rank == 33), "0F0", ()) for rank in range(64)]
    drawn = chosen(peaks)
    assert len(drawn) <= DRAWN
    assert {0, 33, 63} <= set(drawn)
    assert chosen(peaks[:3]) == [0, 1, 2]
    spans = [MeasuredSpan(Action.parse(f"0F{n}"), 0.1 * n, 0.1 * n, 0.1 * n + 0.1) for n in range(4096)]
    few = fewer_spans(spans, 1.0)
    assert len(few) < 500
    assert (few[0].ready, few[-1].end) == (0.0, spans[-1].end)
    stretches = [_stretch(f"0F{n}", 7 if n != 1000 else 8, 5) for n in range(4096)]
    found = columns(Curve(0, 1, stretches), spans, 409.6, 410.0)
    assert len(found) <= 1500
    assert max(column.stretch.most for column in found) == 8
    assert sum(grouped(found[0].stretch.held)) == 7
