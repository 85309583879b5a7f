"""A loss curve as SVG text, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 150, 20, 44

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #444 }
  .grid { stroke: #ddd } .train { stroke: #9db8e8; fill: none }
  .smooth { stroke: #1f5fd0; fill: none; stroke-width: 2 } .held { fill: #d0461f } .floor { stroke: #2a8a4a;
    stroke-dasharray: 6 4 }
  .label-smooth { fill: #1f5fd0 } .label-held { fill: #d0461f } .label-floor { fill: #2a8a4a }
""".strip()


class Point(NamedTuple):
    x: float
    y: float


class Axes(NamedTuple):
    """Maps data to pixels: x from 0 to `last`, y from `low` to `high`."""

    last: float
    low: float
    high: float

    def pixel(self, point: Point) -> Point:
        across = point.x / self.last
        up = (point.y - self.low) / (self.high - self.low)
        return Point(LEFT + across * (WIDTH - LEFT - RIGHT), TOP + (1 - up) * (HEIGHT - TOP - BOTTOM))


def loss_chart(train: Sequence[Point], held_out: Sequence[Point], lowest: float) -> str:
    """Loss of every training step, its running mean, the held-out losses as dots, and the line below which no model
    can get.
    """
    values = [point.y for point in (*train, *held_out)] + [lowest]
    ticks = nice_ticks(min(values), max(values))
    axes = Axes(last=train[-1].x, low=min(ticks[0], min(values)), high=max(ticks[-1], max(values)))
    smooth = running_mean(train, window=max(1, len(train) // 20))
    parts = [_grid(axes, ticks), _line(axes, train, "train"), _line(axes, smooth, "smooth")]
    floor = axes.pixel(Point(0, lowest)).y
    parts.append(f'<line class="floor" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{floor:.1f}" y2="{floor:.1f}"/>')
    for point in held_out:
        dot = axes.pixel(point)
        parts.append(
            f'<circle class="held" cx="{dot.x:.1f}" cy="{dot.y:.1f}" r="4"><title>held out: '
            f"{point.y:.3f}</title></circle>"
        )
    labels = [("smooth", "training"), ("held", "held out"), ("floor", f"best possible {lowest:.2f}")]
    for row, (name, label) in enumerate(labels):
        parts.append(f'<text class="label-{name}" x="{WIDTH - RIGHT + 14}" y="{TOP + 16 + 20 * row}">{label}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss over '
        'steps">\n'
        f'<style>{STYLE}</style>\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    high = max(high, low + 1e-3)
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [index * step for index in range(math.floor(low / step), math.ceil(high / step) + 1)]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Every point with the mean of itself and up to `window - 1` points before it."""
    means = []
    for index, point in enumerate(points):
        recent = points[max(0, index + 1 - window) : index + 1]
        means.append(Point(point.x, sum(other.y for other in recent) / len(recent)))
    return means


def _grid(axes: Axes, ticks: Sequence[float]) -> str:
    parts = []
    for tick in ticks:
        y = axes.pixel(Point(0, tick)).y
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in nice_ticks(0, axes.last):
        if tick <= axes.last:
            parts.append(
                f'<text x="{axes.pixel(Point(tick, axes.low)).x:.1f}" y="{HEIGHT - BOTTOM + 18}" '
                f'text-anchor="middle">{tick:g}</text>'
            )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    return "\n".join(parts)


def _line(axes: Axes, points: Sequence[Point], name: str) -> str:
    pixels = " ".join(f"{p.x:.1f},{p.y:.1f}" for p in map(axes.pixel, points))
    return f'<polyline class="{name}" points="{pixels}"/>'
