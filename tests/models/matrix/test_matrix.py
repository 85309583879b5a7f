"""Cells that the package says are verified, one process against ranks: of every sixth model one of its axes, so that
all axes have their turn among the models; SHARDWRIGHT_MATRIX_TURN=1 and on take others. The whole matrix is
`python -m tests.models.matrix`.
"""

from __future__ import annotations

import os

import pytest

from shardwright.models.verified import Row, load
from shardwright.shardformer.modeling.chatglm2_6b import modeling_chatglm
from shardwright.testing.matrix import AXES, Subject, pick_axes, run_cells

FIRST = [row for row in load().rows if row.first and any(cell.outcome == "verified" for cell in row.cells.values())]
TURN = int(os.environ.get("SHARDWRIGHT_MATRIX_TURN", "0"))
ROUND = 6  # turns in which every model has one
# Four ranks, or layers that are compiled: these have one model a turn each, and are no model's only cell.
DEAR = [axis.name for axis in AXES.values() if axis.world > 2 or axis.name in ("jit", "overlap")]


def models_of_turn(turn: int) -> list[Row]:
    return FIRST[turn % ROUND :: ROUND]


def axes_of_turn(number: int, verified: list[str], turn: int) -> list[str]:
    """For the model `number`, which has the `verified` axes."""
    turn //= ROUND
    usual = [axis for axis in verified if axis not in DEAR]
    chosen = [usual[(number + turn) % len(usual)]] if usual else verified[:1]
    # Models of the dear axes are spread over all of them, and move on by one every turn.
    places = {(turn + place * len(FIRST) // len(DEAR)) % len(FIRST): axis for place, axis in enumerate(DEAR)}
    return chosen + [axis for place, axis in places.items() if place == number and axis in verified]


def check(row: Row, axes: list[str]) -> None:
    module = modeling_chatglm.__name__ if row.model_type == "chatglm" else "transformers"
    cells = list(run_cells(Subject(row.model_class, module), pick_axes(axes)))
    wrong = [f"{cell['axis']}: {cell['outcome']}: {cell['why']}" for cell in cells if cell["outcome"] != "verified"]
    assert not wrong, "\n".join(wrong)


def _verified(row: Row) -> list[str]:
    return [axis for axis in AXES if axis in row.cells and row.cells[axis].outcome == "verified"]


@pytest.mark.parametrize("row", models_of_turn(TURN), ids=lambda row: row.model_class)
def test_cells_that_were_verified_are_so(row: Row) -> None:
    check(row, axes_of_turn(FIRST.index(row), _verified(row), TURN))


def test_every_cell_has_its_turn() -> None:
    for number, row in enumerate(FIRST):
        verified = _verified(row)
        turns = [turn for turn in range(ROUND * max(len(FIRST), len(AXES))) if row in models_of_turn(turn)]
        days = [axes_of_turn(number, verified, turn) for turn in turns]
        assert {axis for axes in days for axis in axes} == set(verified), row.model_class
        assert all(days)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", load().rows, ids=lambda row: row.model_class)
def test_every_cell_that_was_verified_is_so(row: Row) -> None:
    check(row, _verified(row))
