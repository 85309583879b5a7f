"""`shardwright plan --html FILE`: predicts, draws, writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..outputs import problem_with, refusal

if TYPE_CHECKING:
    from ...planner.machines import Machine
    from ...planner.peaks import Found
    from ...planner.replay import Job
    from ...plugins.hybrid.resolved import ResolvedLayout


def refuse(path: Path) -> None:
    """ValueError where the page could not be written; before anything is replayed for it."""
    if problem := problem_with(path):
        raise ValueError(f"--html {problem}")


def write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--html {refusal(path, error)}") from error


def page_of(
    job: Job,
    world_size: int,
    layout: ResolvedLayout,
    attention: str,
    found: Found,
    machine: Machine,
    samples: int,
    length: int | None,
) -> str:
    """`samples` of a data-parallel rank, of so many tokens; `attention` says what computes it."""
    from ...planner.report import figures
    from ...planner.step_times import step_times
    from .page import Drawn, page

    times = step_times(job, world_size, machine)
    amount = samples * layout.sizes["dp"] * (length or 1)
    return page(
        Drawn(
            layout,
            found.peaks,
            found.note,
            figures(layout, attention, found.peaks, job.batch, found.note),
            found.curves,
            times,
            machine.source,
            round(machine.memory),
            amount,
            "samples" if length is None else "tokens",
        )
    )
