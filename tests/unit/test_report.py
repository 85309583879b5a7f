"""The page of a run: well formed, complete, without the network; runs of every state; what is no run."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_pipeline_timeline import made_up

from shardwright.cli.main import main
from shardwright.cli.report.curves import Curve, Point, chart, nice_ticks, running_mean, short, thinned
from shardwright.cli.report.runs import read_run
from shardwright.pipeline.snapshots import read_timelines, write_timelines

VOID = {"meta", "br", "link", "img", "input"}


class Strict(html.parser.HTMLParser):
    """Every tag is closed by its own, in order; nothing is loaded."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def write_run(folder: Path, steps: int = 40, **recipe: Any) -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        rows.append(
            {
                "step": step,
                "loss": 1 + 4 / step,
                "learning_rate": 1e-3 / step,
                "grad_norm": 2.0,
                "tokens_per_second": 1e4 + step,
                "step_time": 0.1,
                "tokens_seen": 100 * step,
                "memory_gib": None,
            }
        )
        if step % 10 == 0:
            rows.append({"step": step, "eval_loss": 1.5 + 1 / step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"learning_rate": 1e-3, "layout": {"pp_size": 2}} | recipe))
    facts = {"run": "<try> 1", "model": "<Llama>", "parameters": 12345, "total_steps": steps}
    told = {"facts": facts, "made with": {"torch": "2.13"}}
    (folder / "run.json").write_text(json.dumps(told))
    return folder


def test_a_run_is_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "first")
    write_timelines({"zb": made_up("zb"), "1f1b": made_up("1f1b")}, folder / "timeline.json")
    assert read_timelines(folder / "timeline.json")["zb"].makespan == pytest.approx(made_up("zb").makespan)
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"wrote {folder}/report.html\n"
    text = (folder / "report.html").read_text()
    tags = Strict(text).seen
    assert not [name for _, found in tags for name in found if name in ("src", "href")]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    charts = [found["aria-label"] for tag, found in tags if tag == "svg" and found.get("class") == "curves"]
    names = ("Loss", "Learning rate", "Gradient norm", "Tokens per second", "Seconds of a step")
    assert charts == [f"{name} over step" for name in names], "no memory was measured"
    assert sum(tag == "circle" for tag, _ in tags) == 4, "evaluations"
    assert sum(tag == "svg" for tag, _ in tags) == 5 + 2 * 2
    for words in (
        "&lt;try&gt; 1",
        "&lt;Llama&gt;",
        "12,345",
        "40 of 40 steps",
        "1f1b, measured",
        "zb, ideal",
        "prefers-color-scheme",
    ):
        assert words in text
    assert text.count(">input gradient</span>") == 1, "one legend for all"


def test_two_runs_are_compared(tmp_path: Path) -> None:
    one, other = write_run(tmp_path / "a"), write_run(tmp_path / "b", 30, learning_rate=0.5, max_grad_norm=2.0)
    lines = (other / "metrics.jsonl").read_text().splitlines()
    changed = json.loads(lines[4]) | {"loss": 9.0}
    strange = json.loads(lines[5]) | {"loss": float("nan")}
    text = "\n".join([*lines[:4], json.dumps(changed), json.dumps(strange), *lines[6:], '{"step": 31, "lo'])
    (other / "metrics.jsonl").write_text(text)
    assert (
        main(["report", str(one), str(other / "metrics.jsonl"), "--x", "tokens", "--output", str(tmp_path / "c")]) == 0
    )
    page = (tmp_path / "c").read_text()
    rows = dict(re.findall(r"<tr><td>([\w.]+)</td>(.*?)</tr>", page))
    assert rows["learning_rate"] == "<td>0.001</td><td>0.5</td>"
    assert rows["max_grad_norm"] == "<td>not said</td><td>2.0</td>"
    assert "layout.pp_size" not in rows
    assert "Over 29 common steps their losses are at most 7.2 apart, at step 5." in page
    assert "1 of the lines of metrics.jsonl could not be read" in page
    assert "the loss of 1 step is no finite number, at step 6 first" in page
    Strict(page)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "frist", "there is no such directory - did you mean 'first'?"),
        (lambda folder: folder, "has no metrics.jsonl; there is one in first"),
        (lambda folder: _with(folder / "empty", ""), "has no step"),
        (lambda folder: _with(folder / "half", '{"step": 1, "loss"'), "has no step"),
    ],
)
def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Any, said: str) -> None:
    write_run(tmp_path / "first")
    assert main(["report", str(make(tmp_path))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shardwright report: ")
    assert said in line


def _with(folder: Path, lines: str) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def test_a_run_whose_files_are_odd_is_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if "eval_loss" not in line]
    again = [{**row, "loss": 9.0} for row in rows[7:10]]  # from a checkpoint of step 7
    odd = [{**rows[10], "loss": 1e308}, {**rows[11], "loss": -1e308}, {"step": 12, "eval_loss": float("nan")}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:10], *again, *odd]))
    (run / "timeline.json").write_text('{"1f1b": {}}')
    (run / "run.json").write_text('{"layout": "auto", "tables": [1], "facts": {"model": "Llama"}, "floor": "low"}')
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    Strict(page)
    assert "3 steps were trained again later" in page
    assert "timeline.json could not be read" in page
    assert "run.json is not read where it says layout, tables, floor" in page
    assert "the loss of 2 steps is no finite number" in page
    assert "Llama" in page
    assert "nan" not in page.lower()


def test_evaluations_of_steps_that_were_trained_again_do_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 6)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "eval_loss" not in row]
    lost = [*steps[:4], {"step": 4, "eval_loss": 0.25}, steps[4], {"step": 5, "eval_loss": 0.125}]
    kept = [{"step": 3, "eval_loss": 4.0}, {"step": 5, "eval_loss": 2.0}]  # gone on from step 3
    found = [*steps[:3], kept[0], *lost[3:], *steps[3:5], kept[1], steps[5], {"step": 6, "eval_loss": float("inf")}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    read = read_run(run)
    assert [(row["step"], row["eval_loss"]) for row in read.evaluations[:-1]] == [(3, 4.0), (5, 2.0)]
    assert [note for note in read.notes if "held-out" in note] == [
        "the held-out loss of 1 evaluation is no finite number, at step 6 first"
    ]


def test_figures_of_evaluations_are_told_and_drawn(tmp_path: Path) -> None:
    """Of a classification, of which the other run has none."""
    scored, other = write_run(tmp_path / "scored"), write_run(tmp_path / "other")
    rows = [json.loads(line) for line in (scored / "metrics.jsonl").read_text().splitlines()]
    for row, accuracy in zip(
        [row for row in rows if "eval_loss" in row], (0.5, 0.75, 0.625, float("nan")), strict=True
    ):
        row |= {"eval_accuracy": accuracy, "eval_exact_match": 0.25, "eval_odd": "text"}
    (scored / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for runs in ([scored], [scored, other]):
        assert main(["report", *map(str, runs), "--output", str(tmp_path / "page")]) == 0
        page = (tmp_path / "page").read_text()
        Strict(page)
        assert "<td>held-out accuracy</td><td>0.6250, most 0.7500 at step 20</td>" in page
        assert "<td>held-out exact match</td><td>0.2500, most 0.2500 at step 10</td>" in page
        assert page.count("<b>Held-out accuracy</b>") == page.count("<b>Held-out exact match</b>") == 1
        assert "odd" not in page
        assert 'data-values="0.5 0.75 0.625"' in page


def test_a_curve_has_its_values_whatever_an_outlier_makes_of_its_axis() -> None:
    """The page tells them where it is pointed at; a pixel of this one stands for 540."""
    points = [Point(float(step), 1e5 if step == 7 else step / 100) for step in range(1, 11)]
    drawn = chart("norm", [Curve("norm", "line a", points)])
    (values,) = re.findall(r'data-values="([^"]*)"', drawn)
    assert [float(value) for value in values.split()] == [point.y for point in points]
    (pixels,) = re.findall(r'points="([^"]*)"', drawn)
    assert len(pixels.split()) == 10
    assert 'data-last="10.0"' in drawn


def test_a_mean_goes_along_with_its_window() -> None:
    values = [1e300, 0.1, None, math.nan, -3.0, 1e-300, *(number / 7 for number in range(20_000))]
    points = [Point(at, value) for at, value in enumerate(values)]
    means = running_mean(points, 1000)
    for at in (0, 2, 3, 4, 999, 1000, 1003, 20_005):
        recent = [value for value in values[max(0, at - 999) : at + 1] if value is not None and value == value]
        wanted = None if at in (2, 3) else pytest.approx(math.fsum(recent) / len(recent), rel=1e-12)
        assert means[at].y == wanted


def test_curves_keep_gaps_and_outlines() -> None:
    points = [Point(step, None if step == 5000 else 7.0 if step == 777 else step / 1e4) for step in range(1, 10_001)]
    few = thinned(points)
    assert len(few) < 700
    assert Point(777, 7.0) in few
    assert Point(5000, None) in few
    assert [point.x for point in few] == sorted(point.x for point in few)
    drawn = chart("t", [Curve("c", "line a", points)])
    assert drawn.count("<polyline") == 2
    for x, y in re.findall(r"(\d+\.\d),(\d+\.\d)", drawn):
        assert 0 <= float(x) <= 420
        assert 0 <= float(y) <= 230
    assert chart("t", [Curve("c", "line a", [Point(1, 2.0)])], floor=2.0).count("<circle") == 1


def test_numbers_of_axes() -> None:
    assert nice_ticks(0.9, 4.2) == pytest.approx([0, 1, 2, 3, 4, 5])
    assert nice_ticks(0, 200) == pytest.approx([0, 50, 100, 150, 200])
    assert [short(value) for value in (2.5e6, 1000, 0.25, 2e-5, 0)] == ["2.5M", "1k", "0.25", "2e-05", "0"]
    means = running_mean([Point(1, 1.0), Point(2, None), Point(3, 5.0)], window=3)
    assert [point.y for point in means] == [1.0, None, 3.0]
