"""Curves of memory as SVG text, on the scale of `timeline_html`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from ...pipeline.timeline_html import LEFT, WIDTH, key
from ...planner.holders import KEPT
from ...plugins.hybrid.resolved import size
from ..report.curves import nice_ticks
from .columns import Column, highest

HEIGHT = 120
_UNITS = {2**30: "GiB", 2**20: "MiB", 2**10: "KiB", 1: "B"}
_TOP, _BOTTOM = 20, 4  # a line of words above, and room below

# What holds memory, by how its name begins, from below to above.
GROUPS = (
    (KEPT, "kept between steps", "#7d8790"),
    ("activations", "activations", "#4c8bf5"),
    ("recomputed", "recomputed layers", "#57b894"),
    ("gradients inside", "gradients inside of a backward", "#2f9e5b"),
    ("gradients on", "gradients on their way", "#9b59b6"),
    ("gathered", "gathered weights", "#17a2b8"),
    ("optimizer", "optimizer step", "#795548"),
    ("messages", "messages", "#d16ba5"),
    ("the batch", "the batch", "#b5651d"),
    ("", "others", "#7a6ff0"),
)

STYLE = """
svg.memory { display: block; touch-action: pan-x pan-y }
.memory .peak { stroke: var(--ink); stroke-dasharray: 3 3 } .memory .tip { fill: var(--ink) }
.memory .cursor { stroke: var(--ink); visibility: hidden }
.memory .words { font: 12px system-ui, sans-serif; fill: var(--ink) }
.memory .axis { font: 11px system-ui, sans-serif; fill: var(--faint); text-anchor: end }
.memory .limit { stroke: #d33a2c; stroke-dasharray: 6 4 }
.memory .between { stroke: var(--faint); stroke-dasharray: 2 3 }
""".strip()


def grouped(held: Iterable[tuple[str, int]]) -> list[int]:
    """Bytes of every group."""
    found = [0] * len(GROUPS)
    for what, amount in held:
        found[next(place for place, (begin, _, _) in enumerate(GROUPS) if what.startswith(begin))] += amount
    return found


def legend(curves: Iterable[Sequence[Column]]) -> list[str]:
    """Of the groups that there are."""
    there = [False] * len(GROUPS)
    for every in curves:
        for column in every:
            there = [one or bool(other) for one, other in zip(there, grouped(column.stretch.held), strict=True)]
    return [key(color, name) for (_, name, color), one in zip(GROUPS, there, strict=True) if one]


def memory_svg(
    rank: int, every: Sequence[Column], kept: int, seconds: float, most: int, limit: int | None = None
) -> str:
    """Of one rank. `most` is what the full height stands for, `limit` a line where there is room for it."""
    unit = next((each for each in (2**30, 2**20, 2**10) if most >= each), 1)
    ticks = nice_ticks(0.0, most / unit, 3)
    full = ticks[-1] * unit
    scale, high = (WIDTH - LEFT) / max(seconds, 1e-12), HEIGHT - _TOP - _BOTTOM

    def x(time: float) -> float:
        return LEFT + time * scale

    def y(amount: float) -> float:
        return _TOP + (1 - amount / full) * high

    parts = [
        f'<svg class="memory" viewBox="0 0 {WIDTH} {HEIGHT}" width="100%" xmlns="http://www.w3.org/2000/svg" '
        f'role="img" aria-label="memory of rank {rank} over the step" data-rank="{rank}">'
    ]
    for tick in ticks:
        at = y(tick * unit)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}"/>')
        if tick:
            parts.append(f'<text class="axis" x="{LEFT - 4}" y="{at + 4:.1f}">{tick:g} {_UNITS[unit]}</text>')
    below = [0] * len(every)
    amounts = [grouped(column.stretch.held) for column in every]
    for place, (_, _, color) in enumerate(GROUPS):
        tops = [low + own[place] for low, own in zip(below, amounts, strict=True)]
        if any(own[place] for own in amounts):
            parts.append(f'<path fill="{color}" d="{_area(every, below, tops, x, y)}"/>')
        below = tops
    parts.append(f'<line class="between" x1="{LEFT}" x2="{WIDTH}" y1="{y(kept):.1f}" y2="{y(kept):.1f}"/>')
    if limit is not None and limit <= full:
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>')
    top = highest(every)
    middle, crest = x((top.start + top.end) / 2), y(top.stretch.most)
    parts.append(f'<line class="peak" x1="{middle:.1f}" x2="{middle:.1f}" y1="{crest:.1f}" y2="{HEIGHT - _BOTTOM}"/>')
    parts.append(
        f'<path class="tip" d="M{middle - 5:.1f} {crest - 8:.1f}h10l-5 8z"/>'
        f'<text class="words" x="{_within(middle):.1f}" y="{crest - 10:.1f}" text-anchor="{_anchor(middle)}">'
        f"{escape(f'{size(top.stretch.most)} in {top.stretch.name}')}</text>"
    )
    parts.append(f'<line class="cursor" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"/></svg>')
    return "".join(parts)


def _anchor(middle: float) -> str:
    return "start" if middle < LEFT + 80 else "end" if middle > WIDTH - 80 else "middle"


def _within(middle: float) -> float:
    return min(max(middle, LEFT), WIDTH)


def _area(
    every: Sequence[Column],
    low: Sequence[int],
    high: Sequence[int],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    """Along the tops to the right, along the bottoms back."""
    there = [f"{x(c.start):.1f} {y(h):.1f}H{x(c.end):.1f}" for c, h in zip(every, high, strict=True)]
    back = [f"{x(c.end):.1f} {y(h):.1f}H{x(c.start):.1f}" for c, h in zip(reversed(every), reversed(low), strict=True)]
    return f"M{'L'.join([*there, *back])}Z"
