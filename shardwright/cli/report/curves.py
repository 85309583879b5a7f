"""Curves over steps as SVG text, without a plotting library. Colours are names of CSS classes: see `STYLE`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple, TypeGuard

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 10, 36
_WHOLE = 2**1074  # times which every float is a whole number
_MOST = 600  # points of a curve; of more, the least and the greatest of each group are drawn

STYLE = """
:root { --ink: #222; --faint: #667; --grid: #e2e4e8; --paper: #fff; --a: #1f5fd0; --b: #c2570c; --floor: #2a8a4a }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --faint: #9aa0a8; --grid: #33373d; --paper: #16181c;
    --a: #7aa7ff; --b: #ff9d57; --floor: #5fc586 }
}
svg.curves { width: 100%; height: auto; display: block; touch-action: pan-y }
svg.curves text { font: 12px system-ui, sans-serif; fill: var(--faint) }
.grid { stroke: var(--grid) } .under { fill: var(--paper) }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round } .raw { fill: none; stroke-width: 1; opacity: .35 }
.a { stroke: var(--a) } .b { stroke: var(--b) }
circle.a { fill: var(--a) } circle.b { fill: var(--b) } circle { stroke: var(--paper) !important }
.floor { stroke: var(--floor); stroke-dasharray: 6 4 }
.cursor { stroke: var(--faint); stroke-dasharray: 2 3; visibility: hidden }
""".strip()


class Point(NamedTuple):
    """`y` is None where there is no number, and the curve has a gap."""

    x: float
    y: float | None


@dataclass(frozen=True)
class Curve:
    """
    name     what it is called when it is pointed at
    look     classes: a or b, with line or raw; dots for points without a line between them
    """

    name: str
    look: str
    points: Sequence[Point]
    dots: bool = False


class Axes(NamedTuple):
    """Maps data to pixels: x from 0 to `last`, y from `low` to `high`."""

    last: float
    low: float
    high: float

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        across = x / self.last
        up = (y - self.low) / (self.high - self.low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), TOP + (1 - up) * (HEIGHT - TOP - BOTTOM)


def chart(
    title: str, curves: Sequence[Curve], x_name: str = "step", floor: float | None = None, zero: bool = False
) -> str:
    """Curves and dots over `x_name`, and a line below which no curve can get.

    zero   whether the y axis begins at 0
    """
    values = [point.y for curve in curves for point in curve.points if point.y is not None]
    values += [floor] if floor is not None else []
    values += [0.0] if zero else []
    ticks = nice_ticks(min(values, default=0.0), max(values, default=1.0))
    last = max((point.x for curve in curves for point in curve.points), default=1.0) or 1.0
    axes = Axes(last, ticks[0], ticks[-1])
    parts = [_grid(axes, ticks, x_name)]
    if floor is not None:
        y = axes.pixel(0, floor)[1]
        parts.append(f'<line class="floor" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for curve in curves:
        parts += _dots(axes, curve) if curve.dots else _lines(axes, curve)
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)} over {escape(x_name)}" data-last="{axes.last!r}">\n{body}\n</svg>'
    )


def alone(svg: str) -> str:
    """A chart as a file that needs no page around it."""
    start = svg.index(">") + 1
    return f'{svg[:start]}<style>{STYLE}</style><rect class="under" width="{WIDTH}" height="{HEIGHT}"/>{svg[start:]}\n'


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About `wanted` multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    high = max(high, low + (1e-3 * abs(low) or 1e-9))
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [index * step for index in range(math.floor(low / step), math.ceil(high / step) + 1)]


def running_mean(points: Sequence[Point], window: int) -> list[Point]:
    """Every point with the mean of itself and those of up to `window - 1` points before it that have a number.

    The sum goes along with the window, as a whole number, which loses nothing when an outlier leaves it.
    """
    means: list[Point] = []
    total = count = 0
    for index, point in enumerate(points):
        for other, sign in ((point, 1), (points[index - window], -1)) if index >= window else ((point, 1),):
            if _is_number(other.y):
                numerator, denominator = other.y.as_integer_ratio()
                total += sign * numerator * (_WHOLE // denominator)
                count += sign
        means.append(Point(point.x, total / (count * _WHOLE) if _is_number(point.y) else None))
    return means


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def short(value: float) -> str:
    """2 500 000 as 2.5M, 0.00002 as 2e-05."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * 0.99999:
            return f"{value / factor:.4g}{letter}"
    return f"{value:.4g}"


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about `_MOST` points with the same outline; gaps stay."""
    if len(points) <= _MOST:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        numbers = [point for point in group if point.y is not None]
        chosen = {point for point in group if point.y is None}
        if numbers:
            chosen |= {min(numbers, key=lambda point: point.y or 0.0), max(numbers, key=lambda point: point.y or 0.0)}
        kept += sorted(chosen, key=lambda point: point.x)
    return kept


def _grid(axes: Axes, ticks: Sequence[float], x_name: str) -> str:
    parts = []
    for tick in ticks:
        y = axes.pixel(0, tick)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    for tick in nice_ticks(0, axes.last):
        if tick <= axes.last:
            label = short(tick)
            x = min(axes.pixel(tick, axes.low)[0], WIDTH - 3.5 * len(label))  # the last one is not to be cut off
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 5}" text-anchor="middle">{escape(x_name)}</text>')
    return "\n".join(parts)


def _pieces(points: Sequence[Point]) -> Iterator[list[tuple[float, float]]]:
    """Points between gaps."""
    piece: list[tuple[float, float]] = []
    for point in points:
        if point.y is not None:
            piece.append((point.x, point.y))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _lines(axes: Axes, curve: Curve) -> Iterator[str]:
    for piece in _pieces(thinned(curve.points)):
        pixels = " ".join(f"{x:.3f},{y:.1f}" for x, y in (axes.pixel(*point) for point in piece))
        if len(piece) == 1:  # a line of one point is not seen
            x, y = axes.pixel(*piece[0])
            yield f'<circle class="{curve.look}" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
        values = " ".join(f"{y:.6g}" for _, y in piece)  # a pixel is coarse where the axis has to reach an outlier
        yield (
            f'<polyline class="{curve.look}" data-name="{escape(curve.name)}" data-values="{values}" '
            f'points="{pixels}"/>'
        )


def _dots(axes: Axes, curve: Curve) -> Iterator[str]:
    for point in curve.points:
        if point.y is not None:
            x, y = axes.pixel(point.x, point.y)
            tip = f"{escape(curve.name)} {point.y:.4g}"
            yield f'<circle class="{curve.look}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{tip}</title></circle>'
