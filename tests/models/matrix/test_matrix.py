"""Cells that the package says are verified, one process against ranks: of every model a few of its axes, so that all
models and all axes have their turn. The whole matrix is `python -m tests.models.matrix`.
"""

from __future__ import annotations

import pytest

from shardwright.models.verified import Row, load
from shardwright.shardformer.modeling.chatglm2_6b import modeling_chatglm
from shardwright.testing.matrix import AXES, Subject, pick_axes, run_cells

FIRST = [row for row in load().rows if row.first and any(cell.outcome == "verified" for cell in row.cells.values())]
MAIN = ("tp2", "pp2")
OTHERS = [name for name in AXES if name not in MAIN]


def of_turn(names: list[str] | tuple[str, ...], turn: int, verified: set[str]) -> list[str]:
    """The first of the names from its turn on that was verified; none where none was."""
    after = [*names[turn % len(names) :], *names[: turn % len(names)]]
    return [name for name in after if name in verified][:1]


def check(row: Row, axes: list[str]) -> None:
    module = modeling_chatglm.__name__ if row.model_type == "chatglm" else "transformers"
    cells = list(run_cells(Subject(row.model_class, module), pick_axes(axes)))
    wrong = [f"{cell['axis']}: {cell['outcome']}: {cell['why']}" for cell in cells if cell["outcome"] != "verified"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("row", FIRST, ids=lambda row: row.model_class)
def test_cells_that_were_verified_are_so(row: Row) -> None:
    turn = FIRST.index(row)
    verified = {axis for axis, cell in row.cells.items() if cell.outcome == "verified"}
    check(row, of_turn(MAIN, turn, verified) + of_turn(OTHERS, turn, verified))


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("row", load().rows, ids=lambda row: row.model_class)
def test_every_cell_that_was_verified_is_so(row: Row) -> None:
    check(row, [axis for axis, cell in row.cells.items() if cell.outcome == "verified"])
