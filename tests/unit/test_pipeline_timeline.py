"""Timelines from made-up spans: bubble, costs, trace events, pages."""

from __future__ import annotations

import importlib.util
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardwright.pipeline import schedules
from shardwright.pipeline.planning.actions import COMPUTE, MOVES, OF_STAGE, Kind
from shardwright.pipeline.planning.lowering import lower
from shardwright.pipeline.planning.simulate import Costs, simulate
from shardwright.pipeline.timeline import MeasuredSpan, Timeline
from shardwright.pipeline.timeline_html import page, write_page, write_png

COSTS = Costs(forward=[0.01, 0.02], input_grad=[0.01, 0.03], weight_grad=[0.01, 0.01])


def made_up(style: str = "zb", transfer: float = 0.0) -> Timeline:
    """What a recorder would have seen, had the ranks run exactly as simulated."""
    schedule = schedules.get(style, 2, 5)
    costs = Costs(COSTS.forward, COSTS.input_grad, COSTS.weight_grad, transfer)
    ranks = []
    for actions, spans in zip(lower(schedule).actions, simulate(schedule, costs).spans, strict=True):
        measured, now, compute = [], 0.0, iter(spans)
        for action in actions:
            if action.kind in COMPUTE:
                _, start, end = next(compute)
                measured.append(MeasuredSpan(action, now, start, end))
                now = end
            else:
                measured.append(MeasuredSpan(action, now, now, now))
        ranks.append(measured)
    return Timeline(schedule.placement, ranks)


@pytest.mark.parametrize("style", ["1f1b", "zb"])
def test_measured_against_ideal(style: str) -> None:
    timeline = made_up(style)
    expected = simulate(schedules.get(style, 2, 5), COSTS)
    assert timeline.makespan == pytest.approx(expected.makespan)
    assert timeline.bubble == pytest.approx(expected.bubble)
    assert timeline.ideal().bubble == pytest.approx(expected.bubble)
    if style == "zb":
        costs = timeline.mean_costs()
        assert costs.forward == pytest.approx(COSTS.forward)
        assert costs.input_grad == pytest.approx(COSTS.input_grad)
        assert costs.weight_grad == pytest.approx(COSTS.weight_grad)
    slow = made_up(style, transfer=0.01)
    assert slow.bubble > expected.bubble
    assert slow.ideal().bubble == pytest.approx(expected.bubble)


def test_trace_opens_as_chrome_trace(tmp_path: Path) -> None:
    timeline = made_up()
    timeline.write_trace(tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in complete}
    assert {"0F0", "1I4", "1W4", "0SEND_F0", "1RECV_F0", "wait for 1F0", "0REDUCE"} <= names
    assert all(event["dur"] >= 0 and {"ts", "pid", "tid", "cat", "args"} <= event.keys() for event in complete)
    assert {event["pid"] for event in events} == {0, 1}


def test_page_is_one_self_contained_document(tmp_path: Path) -> None:
    timeline = made_up()
    write_page(timeline, tmp_path / "step.html", title="a < b")
    text = (tmp_path / "step.html").read_text()
    assert text == page(timeline, "a < b")
    assert "a &lt; b" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # the name space of SVG, nothing that is loaded
    drawings = ["<svg" + part.split("</svg>")[0] + "</svg>" for part in text.split("<svg")[1:]]
    assert len(drawings) == 2
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        tips = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
        assert sum(tip.startswith("1I") for tip in tips) == 5
    assert f"{100 * timeline.bubble:.1f} %" in text


def test_png_needs_matplotlib(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ValueError, match="needs matplotlib"):
            write_png(made_up(), tmp_path / "step.png")
    else:
        write_png(made_up(), tmp_path / "step.png")
        assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


def test_pairs_are_one_span_of_two_halves(tmp_path: Path) -> None:
    """What pairs take less than their two apart is found in the timeline, and drawn."""
    costs = Costs(forward=0.01, input_grad=0.01, weight_grad=0.02, hidden=0.2)
    schedule = schedules.get("dualpipev", 2, 6, 2)
    simulated = simulate(schedule, costs)
    ranks = [[MeasuredSpan(action, start, start, end) for action, start, end in spans] for spans in simulated.spans]
    timeline = Timeline(schedule.placement, ranks)
    assert timeline.makespan == pytest.approx(simulated.makespan)
    assert timeline.bubble == pytest.approx(simulated.bubble), "a pair counts once"
    found = timeline.mean_costs()
    assert found.forward == pytest.approx([0.01] * 4)
    assert found.hidden == pytest.approx(0.2)
    assert timeline.ideal().makespan == pytest.approx(simulated.makespan)
    number = sum(span.action.kind is Kind.FB for spans in ranks for span in spans)
    assert number > 4
    assert page(timeline).count('height="12"') == 2 * 2 * number, "two halves of a row each, measured and ideal"
    beside = [event for event in timeline.trace_events() if event["ph"] == "X" and event["tid"] == 3]
    assert len(beside) == number
    if importlib.util.find_spec("matplotlib") is not None:
        write_png(timeline, tmp_path / "step.png")


def test_kinds_have_colors() -> None:
    from shardwright.pipeline.timeline_html import COLORS, LEGEND

    assert set(COLORS) == set(LEGEND) == COMPUTE | OF_STAGE | MOVES
