"""Drawings of a pipeline step: one self-contained HTML page with SVG inside, or a PNG where matplotlib is installed.

Both show what was measured and, below, what the simulator makes of the same costs without jitter and transfers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from .planning.actions import COMPUTE, Kind
from .timeline import Timeline

COLORS = {
    Kind.F: "#4c8bf5",
    Kind.FB: "#7a6ff0",
    Kind.B: "#2f9e5b",
    Kind.I: "#57b894",
    Kind.W: "#e8a33d",
    Kind.REDUCE: "#9b59b6",
    Kind.GATHER: "#17a2b8",
    Kind.FREE: "#8a939b",
    Kind.OFFLOAD: "#b5651d",
    Kind.RELOAD: "#d16ba5",
}
WAIT = "#e3e3e3"
LEGEND = {
    Kind.F: "forward",
    Kind.FB: "forward beside a backward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.REDUCE: "reduce",
    Kind.GATHER: "gather weights",
    Kind.FREE: "free weights",
    Kind.OFFLOAD: "offload activations",
    Kind.RELOAD: "reload activations",
}

WIDTH, LEFT, ROW, BAR = 1100, 60, 30, 24


class Bar(NamedTuple):
    rank: int
    start: float
    end: float
    color: str
    label: str
    tip: str
    top: float = 0.0  # of the row's height, and how much of it: of a pair each has a half
    height: float = 1.0
    later: bool = False  # of the second chunk, or a later one


def _bars(timeline: Timeline) -> Iterator[Bar]:
    """Everything that is drawn: the ranks' whole time as waiting, and what they do on top of it."""
    for rank, spans in enumerate(timeline.ranks):
        yield Bar(rank, 0.0, timeline.makespan, WAIT, "", "idle")
        joined = False
        for action, start, ready, end in spans:
            if action.kind in COMPUTE and ready > start and not joined:
                yield Bar(rank, start, ready, WAIT, "", f"wait for {action}: {1000 * (ready - start):.3f} ms")
            if action.kind in COLORS:
                chunk = timeline.placement.chunk_of(action.stage)
                label = str(action.microbatch) if action.microbatch >= 0 else ""
                tip = (
                    f"{action}: {1000 * (end - ready):.3f} ms (rank {rank}, chunk {chunk}, from {1000 * ready:.3f} ms)"
                )
                half = {"top": 0.5 * joined, "height": 0.5} if joined or action.kind is Kind.FB else {}
                yield Bar(rank, ready, end, COLORS[action.kind], label, tip, **half, later=chunk > 0)
            joined = action.kind is Kind.FB


def svg(
    timeline: Timeline,
    seconds: float,
    more: Iterable[Bar] = (),
    numbers: Sequence[int] | None = None,
    unit: str = "ms",
) -> str:
    """One row per rank; `seconds` is the time that the full width stands for.

    more     bars beside those of the timeline, by row
    numbers  of the ranks in the rows, where these are not all
    unit     of a thousandth of a second's place, where times are no seconds
    """
    scale = (WIDTH - LEFT) / max(seconds, 1e-9)
    num_ranks = len(timeline.ranks)
    whole = num_ranks * ROW + 24
    parts = [f'<svg viewBox="0 0 {WIDTH} {whole}" width="100%" xmlns="http://www.w3.org/2000/svg">']
    for rank in range(num_ranks):
        parts.append(f'<text x="4" y="{rank * ROW + 17}" class="name">rank {numbers[rank] if numbers else rank}</text>')
    for rank, start, end, color, label, tip, top, share, later in chain(_bars(timeline), more):
        # The second chunk and later ones are drawn with an outline, so that a V or an interleaving can be seen.
        x, width = LEFT + start * scale, max((end - start) * scale, 0.3)
        y, height = rank * ROW + 1 + top * BAR, share * BAR
        look = f'fill="{color}"' if color != WAIT else 'class="wait"'
        if later:
            look += ' class="later"'
        parts.append(
            f'<g><title>{escape(tip)}</title><rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" '
            f"{look}/>"
        )
        if label and width > 7 * len(label):
            parts.append(f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}" class="label">{label}</text>')
        parts.append("</g>")
    parts += _ticks(seconds, whole - 6, unit)
    parts.append("</svg>")
    return "".join(parts)


def _ticks(seconds: float, y: float, unit: str) -> Iterator[str]:
    scale = (WIDTH - LEFT) / max(seconds, 1e-9)
    step = _nice_step(1000 * seconds / 8)
    for tick in range(int(1000 * seconds / step) + 1):
        x = LEFT + tick * step / 1000 * scale
        place = f'x="{WIDTH}" text-anchor="end"' if x > WIDTH - 60 else f'x="{x:.1f}"'
        yield f'<text {place} y="{y}" class="tick">{tick * step:g} {unit}</text>'


def _nice_step(rough: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(max(rough, 1e-9)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)


_LIGHT = """
.key { padding: 2px 8px; color: #fff; border-radius: 3px; white-space: nowrap; line-height: 1.9; }
.key.wait { background: #e3e3e3; color: #333; }
.label { font: 10px sans-serif; fill: #fff; text-anchor: middle; pointer-events: none; }
.name, .tick { font: 12px sans-serif; fill: #444; }
.wait { fill: #e3e3e3; }
.later { stroke: #333; stroke-width: 1; }
.paper { fill: #fff; }
.wide { overflow-x: auto; }
.wide svg { min-width: 700px; display: block; }
"""
_DARK = """
.name, .tick { fill: #bbb; }
.wait { fill: #3a3d42; }
.key.wait { background: #3a3d42; color: #ddd; }
.later { stroke: #f5f5f5; }
.paper { fill: #16181c; }
"""
STYLE = f"{_LIGHT}@media (prefers-color-scheme: dark) {{{_DARK}}}\n"


def drawing(timeline: Timeline) -> str:
    """The timeline alone, as an SVG file that needs nothing beside it."""
    drawn = svg(timeline, timeline.makespan)
    start = drawn.index(">") + 1
    return f'{drawn[:start]}<rect width="100%" height="100%" class="paper"/><style>{STYLE}</style>{drawn[start:]}\n'


def compared(timelines: Mapping[str, Timeline], scheme: str) -> str:
    """Timelines below each other at one scale, as an SVG file for pages of one color scheme, "light" or "dark"."""
    seconds = max(_end(timeline) for timeline in timelines.values())
    kinds = {span.action.kind for timeline in timelines.values() for spans in timeline.ranks for span in spans}
    parts, x, top = [], 4, 34
    for kind, name in LEGEND.items():
        if kind in kinds:
            parts.append(f'<rect x="{x}" y="5" width="14" height="14" fill="{COLORS[kind]}"/>')
            parts.append(f'<text x="{x + 19}" y="16" class="name">{name}</text>')
            x += 40 + 7 * len(name)
    parts.append(f'<rect x="{x}" y="5" width="14" height="14" class="wait"/>')
    parts.append(f'<text x="{x + 19}" y="16" class="name">waiting; outlined: a rank\'s second part</text>')
    for name, timeline in timelines.items():
        told = f"{name}: a step of {1000 * timeline.makespan:.0f} ms, of which ranks wait {100 * timeline.bubble:.0f} %"
        parts.append(f'<text x="4" y="{top + 12}" class="name">{escape(told)}</text>')
        height = len(timeline.ranks) * ROW + 24
        inner = svg(timeline, seconds).replace('width="100%"', f'y="{top + 20}" width="{WIDTH}" height="{height}"', 1)
        parts.append(inner)
        top += height + 32
    style = _LIGHT + (_DARK if scheme == "dark" else "")
    return (
        f'<svg viewBox="0 0 {WIDTH} {top}" width="100%" xmlns="http://www.w3.org/2000/svg">'
        f'<rect width="100%" height="100%" class="paper"/><style>{style}</style>{"".join(parts)}</svg>\n'
    )


def figure(timeline: Timeline) -> str:
    """The step as measured and the step as it would ideally be, as a piece of HTML that `STYLE` belongs to."""
    return figures({"": timeline})


def figures(timelines: Mapping[str, Timeline]) -> str:
    """One legend, and of every timeline, under its name, what was measured and what is ideal, all at one scale."""
    pairs = {name: (timeline, timeline.ideal()) for name, timeline in timelines.items()}
    seconds = max(_end(drawn) for pair in pairs.values() for drawn in pair)
    kinds = {span.action.kind for timeline in timelines.values() for spans in timeline.ranks for span in spans}
    keys = legend(kinds)
    chunks = max(timeline.placement.num_chunks for timeline in timelines.values())
    outlined = " outlined: second and later chunks," if chunks > 1 else ""
    parts = [f"<p>{' '.join(keys)}{outlined} numbers: microbatches</p>"]
    for name, (measured, ideal) in pairs.items():
        title = f"{escape(name)}, " if name else ""
        for what, drawn in (("Measured", measured), ("Ideal with the measured mean costs", ideal)):
            what = f"{title}{what.lower()}" if title else what
            told = f"{1000 * drawn.makespan:.1f} ms, bubble {100 * drawn.bubble:.1f} %"
            parts.append(f'<h3>{what}: {told}</h3>\n<div class="wide">{svg(drawn, seconds)}</div>')
    return "\n".join(parts)


def legend(kinds: Collection[Kind]) -> list[str]:
    """Of these, and of waiting."""
    keys = [key(COLORS[kind], name) for kind, name in LEGEND.items() if kind in kinds]
    return [*keys, '<span class="key wait">idle or waiting for input</span>']


def key(color: str, name: str) -> str:
    return f'<span class="key" style="background:{color}">{escape(name)}</span>'


def _end(timeline: Timeline) -> float:
    """Of the last thing that is drawn, which may be behind the last computation."""
    return max([timeline.makespan, *(spans[-1].end for spans in timeline.ranks if spans)])


def page(timeline: Timeline, title: str = "Pipeline step") -> str:
    """The HTML page as text; it loads nothing from elsewhere."""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1.5em; color: #222;
  background: #fff }}
@media (prefers-color-scheme: dark) {{ body {{ color: #ddd; background: #16181c }} }}
{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{figure(timeline)}
<p>The bubble is the part of the ranks' time in which they did not compute. The ideal runs the same schedule with every
action as long as it took on average, without jitter and with free transfers. Point at a bar to see its times.</p>
</body></html>
"""


def write_page(timeline: Timeline, path: str | Path, title: str = "Pipeline step") -> None:
    """One self-contained HTML file."""
    Path(path).write_text(page(timeline, title), encoding="utf-8")


def write_png(timeline: Timeline, path: str | Path, title: str = "Pipeline step") -> None:
    """The same as a picture; needs matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "write_png needs matplotlib (pip install matplotlib); write_page makes an HTML page without it"
        ) from error
    ideal = timeline.ideal()
    figure = Figure(figsize=(14, 1.6 + 0.7 * len(timeline.ranks)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}: {timeline.summary()}", fontsize=9)
    axes = figure.subplots(2, 1, sharex=True)
    for axis, which, drawn in zip(axes, ("measured", "ideal"), (timeline, ideal), strict=True):
        for bar in _bars(drawn):
            place = (bar.rank - 0.4 + 0.8 * bar.top, 0.8 * bar.height)
            axis.broken_barh([(1000 * bar.start, 1000 * (bar.end - bar.start))], place, facecolors=bar.color)
        axis.set_yticks(range(len(timeline.ranks)), [f"rank {rank}" for rank in range(len(timeline.ranks))])
        axis.invert_yaxis()
        axis.set_title(f"{which}: bubble {100 * drawn.bubble:.1f} %", fontsize=9)
    axes[1].set_xlabel("ms")
    figure.savefig(str(path), dpi=120)
