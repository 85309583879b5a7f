"""The site of scripts/docs: its pages are all there, and the reference is made of every public name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "site"))

import reference  # noqa: E402


def test_every_page_is_in_the_contents() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())

    def paths(entry: object) -> set[str]:
        if isinstance(entry, str):
            return {entry}
        inside = entry.values() if isinstance(entry, dict) else entry
        return set().union(*map(paths, inside))  # type: ignore[call-overload]

    adopted = set(re.findall(r'": "(\w+\.md)",', (ROOT / "scripts" / "site" / "hooks.py").read_text()))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert paths(yaml.safe_load(text)["nav"]) == adopted | written | set(reference.pages())


@pytest.mark.parametrize("module", reference.PUBLIC)
def test_public_names_have_docstrings(module: str) -> None:
    page = reference.page(module)
    for name in reference.names_of(module):
        section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
        words = re.sub(r"```.*?```", "", section, flags=re.DOTALL).strip()
        assert re.match(r"[^#]", words), f"{module}.{name} has no docstring"


def test_tables_of_docstrings_become_tables() -> None:
    def options() -> None:
        """What is asked, in `words` of *one* kind.

        name, other  what they mean, over
                     two lines
        a_name_that_is_too_long_for_its_column
                     below it
        """

    assert reference.described(options).split("\n\n") == [
        "What is asked, in `words` of \\*one\\* kind.",
        "| | |\n|---|---|\n| `name, other` | what they mean, over two lines |\n"
        "| `a_name_that_is_too_long_for_its_column` | below it |",
    ]
