"""The page of a step that was predicted: its schedule, and below it on the same scale what every rank holds. It loads
nothing, and has all figures in it once more as JSON (`#figures`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ...pipeline import timeline_html
from ...pipeline.timeline import Timeline
from ...pipeline.timeline_html import LEFT, WIDTH, Bar, key
from ...planner.curves import Curve
from ...planner.replay import Peak
from ...planner.step_times import StepTimes
from ...plugins.hybrid.resolved import ResolvedLayout, size
from ..report import curves
from ..report.page import STYLE as PAGE_STYLE
from .columns import Column, columns, fewer_spans, highest
from .memory import GROUPS, STYLE, grouped, legend, memory_svg

DRAWN = 12  # ranks of a page at most
_MESSAGE, _OPTIMIZER, _DATA, _OTHER = "#d16ba5", "#795548", "#9b59b6", "#8a939b"
_BEHIND = {
    "data": (_DATA, "gradients and weights between data-parallel ranks, as far as they are waited for"),
    "optimizer": (_OPTIMIZER, "optimizer step"),
}
_SHOWN = 4  # holders named

SCRIPT = (
    """
const figures = JSON.parse(document.getElementById('figures').textContent);
const bytes = n => { for (const [unit, scale] of [['GiB', 2**30], ['MiB', 2**20], ['KiB', 2**10]])
  if (n >= scale) return (n / scale).toFixed(2) + ' ' + unit; return n + ' B'; };
for (const svg of document.querySelectorAll('svg.memory')) {
  const curve = figures.curves.find(one => one.pipeline_rank == svg.dataset.rank);
  const told = svg.parentElement.querySelector('.told'), cursor = svg.querySelector('.cursor');
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * %(width)d;
    const time = (x - %(left)d) / (%(width)d - %(left)d) * figures.time.seconds;
    const at = curve.columns.find(one => time <= one.end) || curve.columns.at(-1);
    const held = at.held.map((amount, place) => [amount, figures.groups[place]]).filter(one => one[0]);
    held.sort((one, other) => other[0] - one[0]);
    told.textContent = (1000 * time).toPrecision(4) + ' ' + figures.time.unit + ', ' + at.during + ': ' +
      bytes(at.bytes) + ' (' + held.map(([amount, name]) => name + ' ' + bytes(amount)).join(', ') + ')';
    for (const end of ['x1', 'x2']) cursor.setAttribute(end, x);
    cursor.style.visibility = 'visible';
  });
  svg.addEventListener('pointerleave', () => { told.textContent = ''; cursor.style.visibility = 'hidden'; });
}
""".strip()
    % {"width": WIDTH, "left": LEFT}
)

_OWN_STYLE = """
.one-scale > div { min-width: 700px } .one-scale figcaption { position: sticky; left: 0; width: fit-content;
  max-width: min(100%, calc(100vw - 2em)) }
.one-scale { overflow-x: auto } .one-scale svg { display: block } .one-scale figure { margin: .7em 0 0 }
.one-scale figcaption { gap: 0 .8em }
.peaks { min-width: 620px } .peaks td:not(:last-child) { white-space: nowrap }
.fullest { border-radius: 3px; background: #c0392b; color: #fff; padding: 0 7px }
""".strip()


@dataclass(frozen=True)
class Drawn:
    """What is on a page.

    figures  what `--json` prints, of
    layout, peaks, note
    curves  of the ranks that are drawn
    device  whose figures the times follow from, in words
    limit   bytes of a device, where they are known
    amount, what   of a step on all ranks: tokens, or samples
    """

    layout: ResolvedLayout
    peaks: Sequence[Peak]
    note: str
    figures: Mapping[str, Any]
    curves: Sequence[Curve]
    times: StepTimes
    device: str
    limit: int | None
    amount: int
    what: str


def chosen(peaks: Sequence[Peak]) -> list[int]:
    """Ranks that a page draws: all, or the first, the last, the fullest and some between."""
    count = len(peaks)
    if count <= DRAWN:
        return list(range(count))
    fullest = max(peaks, key=lambda peak: peak.most).rank
    even = [round(place * (count - 1) / (DRAWN - 2)) for place in range(DRAWN - 1)]
    return sorted({*even, fullest})


def page(drawn: Drawn) -> str:
    times, ranks = drawn.times, [curve.rank for curve in drawn.curves]
    seconds = times.seconds * (1.0 if times.behind else 1.03)  # room for an optimizer step of unknown length
    every = {
        curve.rank: columns(curve, times.timeline.ranks[curve.rank], times.computed, seconds) for curve in drawn.curves
    }
    data = _figures(drawn, every, seconds)
    title = f"A step of {drawn.layout.model} as it is predicted"
    text = json.dumps(data).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/><title>{escape(title)}</title>
<style>
{curves.STYLE}
{PAGE_STYLE}
{timeline_html.STYLE}
{STYLE}
{_OWN_STYLE}
</style></head><body>
<h1>{escape(title)}</h1>
{_facts(drawn)}
<h2>Peaks of memory</h2>
{_table(drawn)}
<h2>Schedule and memory, on one time scale</h2>
{_legends(drawn, every)}
<div class="one-scale"><div>
{_schedule(drawn, ranks, seconds)}
{"".join(_memory(drawn, curve, every[curve.rank], seconds) for curve in drawn.curves)}
</div></div>
{_words(drawn)}
<script type="application/json" id="figures">{text}</script>
<script>
{SCRIPT}
</script>
</body></html>
"""


def _figures(drawn: Drawn, every: Mapping[int, Sequence[Column]], seconds: float) -> dict[str, Any]:
    times = drawn.times
    return {
        **drawn.figures,
        "time": {
            "unit": _unit(drawn),
            "seconds": seconds,
            "predicted": None if times.relative else times.seconds,
            "computed": times.computed,
            "behind": dict(times.behind),
            "follows_from": drawn.device,
            "relative": times.relative,
        },
        "groups": [name for _, name, _ in GROUPS],
        "curves": [
            {
                "pipeline_rank": rank,
                "columns": [
                    {
                        "start": column.start,
                        "end": column.end,
                        "during": column.stretch.name,
                        "bytes": column.stretch.most,
                        "held": grouped(column.stretch.held),
                    }
                    for column in own
                ],
            }
            for rank, own in every.items()
        ],
    }


def _unit(drawn: Drawn) -> str:
    return "forwards" if drawn.times.relative else "ms"


def _facts(drawn: Drawn) -> str:
    times, timeline = drawn.times, drawn.times.timeline
    rows = {"layout": str(drawn.layout).splitlines()[1], "schedule": drawn.layout._schedule()}
    if times.relative:
        rows["times"] = f"in forwards of a mean stage, a backward taken for two: {times.relative}"
    else:
        rows["step"] = f"{times.seconds:.4g} s, {drawn.amount / times.seconds:,.0f} {drawn.what}/s (an estimate)"
        parts = {"pipeline": times.computed, **times.behind}
        rows["of it"] = ", ".join(f"{what} {seconds / times.seconds:.1%}" for what, seconds in parts.items())
        rows["times follow from"] = drawn.device
    rows["bubble"] = f"{max(timeline.bubble, 0.0):.1%} of the time until all ranks have computed"
    if drawn.note:
        rows["note"] = drawn.note
    cells = "".join(f"<tr><td>{escape(what)}</td><td>{escape(words)}</td></tr>" for what, words in rows.items())
    return f'<div class="wide"><table>{cells}</table></div>'


def _table(drawn: Drawn) -> str:
    fullest = max(drawn.peaks, key=lambda peak: peak.most)
    wanted = {curve.rank for curve in drawn.curves}
    head = "".join(f"<th>{name}</th>" for name in ("pipeline rank", "between steps", "peak", "reached in", "held by"))
    rows = []
    for peak in drawn.peaks:
        if peak.rank not in wanted:
            continue
        mark = ' <span class="fullest">fullest</span>' if peak is fullest and len(drawn.peaks) > 1 else ""
        cells = [escape(each) for each in (size(peak.kept), size(peak.most), peak.during, _holders(peak))]
        rows.append(f"<tr><td>{peak.rank}{mark}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f'<div class="wide"><table class="peaks"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _holders(peak: Peak) -> str:
    return ", ".join(f"{what} {size(amount)}" for what, amount in peak.held[:_SHOWN])


def _legends(drawn: Drawn, every: Mapping[int, Sequence[Column]]) -> str:
    kinds = {span.action.kind for spans in drawn.times.timeline.ranks for span in spans}
    keys = timeline_html.legend(kinds)
    if drawn.times.messages:
        keys.append(key(_MESSAGE, "message to another rank"))
    for what in drawn.times.behind:
        color, name = _BEHIND.get(what, (_OTHER, what))
        keys.append(key(color, name))
    return f"<p>{' '.join(keys)}</p><p>memory: {' '.join(legend(every.values()))}</p>"


def _schedule(drawn: Drawn, ranks: Sequence[int], seconds: float) -> str:
    times = drawn.times
    least = 0.7 * seconds / (WIDTH - LEFT)
    shown = Timeline(times.timeline.placement, [fewer_spans(times.timeline.ranks[rank], least) for rank in ranks])
    rows = {rank: row for row, rank in enumerate(ranks)}
    bars = [
        Bar(
            rows[rank],
            start,
            end,
            _MESSAGE,
            "",
            f"result of {action}, on its way: {1000 * (end - start):.3f}",
            0.86,
            0.14,
        )
        for rank, action, start, end in times.messages
        if rank in rows and end - start > least / 4
    ]
    at = times.computed
    for what, length in times.behind.items():
        color, name = _BEHIND.get(what, (_OTHER, what))
        bars += [Bar(row, at, at + length, color, "", f"{name}: {1000 * length:.3f} ms") for row in rows.values()]
        at += length
    unit = "" if times.relative else "ms"
    return f"<figure>{timeline_html.svg(shown, seconds, bars, list(ranks), unit)}</figure>"


def _memory(drawn: Drawn, curve: Curve, every: Sequence[Column], seconds: float) -> str:
    top, peak = highest(every), drawn.peaks[curve.rank]
    fullest = peak is max(drawn.peaks, key=lambda one: one.most) and len(drawn.peaks) > 1
    mark = '<span class="fullest">fullest</span>' if fullest else ""
    unit = "" if drawn.times.relative else f", {1000 * top.start:.4g} ms after the start"
    words = f"peak {size(peak.most)} in {top.stretch.name}{unit}"
    most = max(one.most for one in drawn.peaks)
    drawing = memory_svg(curve.rank, every, curve.kept, seconds, most, drawn.limit)
    return (
        f"<figure><figcaption><b>rank {curve.rank}</b>{mark}"
        f'<span class="faint">{escape(words)}</span></figcaption><div class="told"></div>{drawing}</figure>'
    )


def _words(drawn: Drawn) -> str:
    lines = [
        "Each column is as high as the most that a rank holds within an action; when within it, is not known. Dotted: "
        "what is there between steps. Point at a curve to see what holds it.",
        "One rank of each pipeline stage is drawn: those that share it hold as much and do the same.",
        "Bytes are those of tensors, of one step replayed as on a CPU, to which an allocator adds its own.",
    ]
    if len(drawn.curves) < len(drawn.peaks):
        lines.insert(
            1, f"Of {len(drawn.peaks)} pipeline ranks {len(drawn.curves)} are drawn: ends, the fullest, some between."
        )
    if drawn.limit is not None:
        lines.append(f"A device has {size(drawn.limit)}; a red line where that is on the scale.")
    return f'<ul class="faint">{"".join(f"<li>{line}</li>" for line in lines)}</ul>'
