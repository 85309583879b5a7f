"""Pictures of what each axis of a layout splits: the weights, the optimizer's state and the batch, on every rank.

A square of weights or state is a part of a layer (rows are layers, columns parts of their features); a square of the
batch is a part of a sequence (rows are sequences, columns tokens). What a rank has is filled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwright.pipeline.planning.actions import Kind
from shardwright.pipeline.timeline_html import COLORS

Holds = Callable[[int, int, int], bool]  # (rank, row, column) -> whether the rank has the square
PARTS = 4
_SQUARE, _GAP, _BETWEEN, _LEFT, _TOP, _HEIGHT = 16, 2, 32, 80, 26, 84


class Axis(NamedTuple):
    """Of a picture: squares that a rank has of weights, of the optimizer's state, and of the batch."""

    weights: Holds
    state: Holds
    batch: Holds
    ranks: int = PARTS


def whole(rank: int, row: int, column: int) -> bool:
    return True


def own_row(rank: int, row: int, column: int) -> bool:
    return row == rank


def own_column(rank: int, row: int, column: int) -> bool:
    return column == rank


def own_square(rank: int, row: int, column: int) -> bool:
    """A quarter of every layer, but of one rank after the other: of flat buffers, parts of no particular shape."""
    return (row + column) % PARTS == rank


def own_expert(rank: int, row: int, column: int) -> bool:
    """The first column is what experts do not have; the others are one expert each."""
    return column in (0, rank + 1)


def half_of_half(rank: int, row: int, column: int) -> bool:
    """Tensor parallel 2 inside of a pipeline of 2."""
    return row // 2 == rank // 2 and column // 2 == rank % 2


AXES = {
    "axis-dp": Axis(whole, whole, own_row),
    "axis-zero1": Axis(whole, own_square, own_row),
    "axis-zero3": Axis(own_square, own_square, own_row),
    "axis-tp": Axis(own_column, own_column, whole),
    "axis-pp": Axis(own_row, own_row, whole),
    "axis-sp": Axis(whole, whole, own_column),
    "axis-ep": Axis(own_expert, own_expert, own_row),
    "axis-tp-pp": Axis(half_of_half, half_of_half, whole),
}
STYLE = """
.paper { fill: #fff; } .name { font: 12px sans-serif; fill: #444; } .none { fill: #e3e3e3; }
@media (prefers-color-scheme: dark) { .paper { fill: #16181c; } .name { fill: #bbb; } .none { fill: #3a3d42; } }
"""


def draw(axis: Axis) -> str:
    """A row of ranks for each of the three."""
    columns = PARTS + (axis.weights is own_expert)
    rows = (
        ("weights", COLORS[Kind.F], axis.weights, columns),
        ("optimizer", COLORS[Kind.W], axis.state, columns),
        ("batch", COLORS[Kind.B], axis.batch, PARTS),
    )
    step = columns * (_SQUARE + _GAP) + _BETWEEN
    width, height = _LEFT + axis.ranks * step, _TOP + len(rows) * _HEIGHT
    parts = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" xmlns="http://www.w3.org/2000/svg">',
        f'<rect width="100%" height="100%" class="paper"/><style>{STYLE}</style>',
    ]
    parts += [f'<text x="{_LEFT + rank * step}" y="16" class="name">rank {rank}</text>' for rank in range(axis.ranks)]
    for number, (name, color, holds, count) in enumerate(rows):
        top = _TOP + number * _HEIGHT
        parts.append(f'<text x="4" y="{top + 40}" class="name">{name}</text>')
        for rank in range(axis.ranks):
            for row in range(PARTS):
                for column in range(count):
                    x = _LEFT + rank * step + column * (_SQUARE + _GAP)
                    look = f'fill="{color}"' if holds(rank, row, column) else 'class="none"'
                    y = top + row * (_SQUARE + _GAP)
                    parts.append(f'<rect x="{x}" y="{y}" width="{_SQUARE}" height="{_SQUARE}" rx="3" {look}/>')
    return "".join([*parts, "</svg>\n"])
