"""What docs/architecture.md and the pictures of the documents say is what the code is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_imports import LEVELS
from write_pictures import files

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


def test_the_table_of_levels_is_the_one_that_is_enforced() -> None:
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", TEXT, re.MULTILINE)
    said = {name: int(level) for level, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert said == {name: level for name, level in LEVELS.items() if not name.startswith("_")}


def test_files_and_rooms_that_are_named_exist() -> None:
    named = set(re.findall(r"`([a-z_]+/[a-z_/.0-9]*)`", TEXT))
    assert len(named) > 20
    places = ("", "shardwright", "tests", "docs")
    missing = [name for name in named if not any((ROOT / place / name).exists() for place in places)]
    assert not missing, missing


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_pictures_are_drawn_from_the_code(path: Path) -> None:
    assert path.read_text() == files()[path], "python tests/unit/write_pictures.py draws them again"
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert any(f"pictures/{path.name}" in document.read_text() for document in documents)
