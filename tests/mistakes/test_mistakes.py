"""Every row of the table of mistakes, on every number of ranks that it is for; and the page that is written from it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from shardwright.testing import run_ranks
from tests.mistakes import write_docs
from tests.mistakes.table import WORLDS, Mistake, areas, find, load

ROWS = [row for area in areas() for row in load(area)]


def run_rows(rank: int, world: int, area: str, names: list[str]) -> None:
    for name in names:
        try:
            find(area, name).run(rank, world)
        except BaseException as error:
            error.add_note(f"in the row {name!r} of tests/mistakes/{area}.py, on {world} ranks")
            raise
        dist.barrier()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("area", areas())
def test_rows_that_share_processes(area: str, world: int) -> None:
    names = [row.name for row in load(area) if world in row.worlds and not row.alone and not wide(row, world)]
    if names:
        run_ranks(run_rows, world, area, names, timeout=240)


def wide(row: Mistake, world: int) -> bool:
    """Whether this number of ranks is left to the sweep: four, of what two ranks show."""
    return world > 2 and 2 in row.worlds


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.parametrize("area", areas())
def test_rows_on_four_ranks_that_two_show(area: str) -> None:
    names = [row.name for row in load(area) if 4 in row.worlds and not row.alone and wide(row, 4)]
    if names:
        run_ranks(run_rows, 4, area, names, timeout=240)


ALONE = [
    pytest.param(row.area, row.name, world, marks=[pytest.mark.sweep] if wide(row, world) else [])
    for row in ROWS
    if row.alone
    for world in row.worlds
]


@pytest.mark.parametrize(("area", "name", "world"), ALONE)
def test_rows_that_need_processes_of_their_own(area: str, name: str, world: int) -> None:
    run_ranks(run_rows, world, area, [name], timeout=find(area, name).timeout)


def test_the_page_is_written_from_the_table() -> None:
    page = Path(write_docs.PAGE).read_text()
    assert page == write_docs.page(page), (
        "docs/troubleshooting.md is not up to date: python -m tests.mistakes.write_docs"
    )
