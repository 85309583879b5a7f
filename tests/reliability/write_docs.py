"""Plays the whole fault matrix and prints what was seen into docs/reliability.md:

python -m tests.reliability.write_docs
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.reliability.cases import CASES, LIMIT, Case
from tests.reliability.processes import PATIENCE
from tests.reliability.test_fault_matrix import check, play

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- the fault matrix: begin -->", "<!-- the fault matrix: end -->"


def row(case: Case, seconds: float) -> str:
    codes = ", ".join(map(str, case.codes))
    words = case.words.replace("|", "\\|")
    lost = "nothing" if case.goes_on else "steps since the last save"
    return f"| {case.happens} | {case.layout} | {case.rank} | {seconds:.0f} s | {codes} | `{words}` | {lost} |"


def table(seconds: Mapping[str, float], limit: float) -> str:
    """`seconds` from the last step to the end of the last process, by the names of cases; `limit`: that of a step."""
    head = [
        f"{len(seconds)} of {len(CASES)} cases, played with `step_timeout={limit:g}`:",
        "",
        "| what happens on one rank | layout | rank | all ended after | exit codes | what is said | what is lost |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join(head + [row(case, seconds[case.name]) for case in CASES if case.name in seconds])


def write(seconds: Mapping[str, float], limit: float) -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(seconds, limit)}\n{END}{rest.split(END)[1]}")


def main() -> None:
    seconds = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            ended = play(case, Path(directory))
            check(case, ended, Path(directory))
            seconds[case.name] = ended.seconds
            print(f"{case.name}: {ended.seconds:.1f} s", flush=True)
    write(seconds, LIMIT * PATIENCE)


if __name__ == "__main__":
    main()
