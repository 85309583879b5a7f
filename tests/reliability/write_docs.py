"""Plays the fault matrix and prints what was seen into docs/reliability.md:

    python -m tests.reliability.write_docs                              # all cases
    python -m tests.reliability.write_docs nan-tp2-rank1 stop-pp2-rank0 # these; rows of others stay as they are

The page says which cases have never been played. All of it takes about eight minutes, half an hour on a busy machine.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.reliability.cases import CASES, LIMIT, Case
from tests.reliability.processes import PATIENCE
from tests.reliability.test_fault_matrix import check, play

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- the fault matrix: begin -->", "<!-- the fault matrix: end -->"


class Seen(NamedTuple):
    """seconds from the last step to the end of the last process, and `step_timeout=`, as the table has them"""

    seconds: str
    limit: str


def row(case: Case, seen: Seen) -> str:
    codes = ", ".join(map(str, case.codes))
    words = case.words.replace("|", "\\|")
    lost = "nothing" if case.goes_on else "steps since the last save"
    which = f"{case.happens} | {case.layout} | {case.rank}"
    return f"| {which} | {seen.seconds} | {seen.limit} | {codes} | `{words}` | {lost} |"


def table(seen: Mapping[str, Seen]) -> str:
    """What was seen of the cases, by their names."""
    missing = [f"`{case.name}`" for case in CASES if case.name not in seen]
    head = [
        f"{len(seen)} of {len(CASES)} cases were played{'; not yet: ' + ', '.join(missing) if missing else ''}.",
        "",
        "| what happens on one rank | layout | rank | ended after | step_timeout | exit codes | what is said | lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(head + [row(case, seen[case.name]) for case in CASES if case.name in seen])


def printed() -> dict[str, Seen]:
    """What the page has."""
    found = {}
    cells = [[cell.strip() for cell in line.split("|")] for line in PAGE.read_text().splitlines()]
    for case in CASES:
        for each in cells:
            if each[1:4] == [case.happens, case.layout, str(case.rank)]:
                found[case.name] = Seen(*each[4:6])
    return found


def write(seen: Mapping[str, Seen]) -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(seen)}\n{END}{rest.split(END)[1]}")


def main(names: list[str]) -> None:
    """Rows are written as they are played. A case that fails keeps the row that it had, and its story is printed."""
    seen = printed()
    failed = []
    for case in CASES:
        if names and case.name not in names:
            continue
        with tempfile.TemporaryDirectory() as directory:
            ended = play(case, Path(directory))
            try:
                check(case, ended, Path(directory))
            except AssertionError as error:
                failed.append(case.name)
                print(f"{case.name}: {ended.codes} after {ended.seconds:.1f} s\n{error}", flush=True)
                continue
        seen[case.name] = Seen(f"{ended.seconds:.0f} s", f"{LIMIT * PATIENCE:g} s")
        write(seen)
        print(f"{case.name}: {ended.seconds:.1f} s", flush=True)
    if failed:
        sys.exit(f"{len(failed)} did not end as they must: {' '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
