"""README and docs say what is true: their code runs, their commands and links exist.

A block that begins with ```python runs as one process, ```python torchrun=2 on two ranks,
```python
torchrun=1,4 as one process and on four ranks: with what torchrun tells its ranks, which tests/examples and
tests/ranks/test_demo.py start by torchrun itself.
```python after=demo needs the results of a demo run and is run by tests/ranks/test_demo.py, ```python pair=before and
pair=after are compared by tests/compat/test_migration.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from shardwright.cli.main import VERBS
from tests.forked_scripts import run_forked

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    where: str
    language: str
    options: dict[str, str]
    code: str


def blocks(language: str) -> list[Block]:
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            options = dict(option.split("=", 1) for option in match[2].split())
            found.append(Block(f"{path.relative_to(ROOT)}:{line}", match[1], options, match[3]))
    return [block for block in found if block.language == language]


PYTHON = [block for block in blocks("python") if not {"after", "pair"} & set(block.options)]


@pytest.mark.parametrize("block", PYTHON, ids=[block.where for block in PYTHON])
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code)
    for ranks in map(int, block.options.get("torchrun", "1").split(",")):
        codes, printed = run_forked(ranks, script, cwd=tmp_path)
        assert codes == [0] * ranks, f"{block.where} on {ranks} rank(s)\n{printed}"


def test_a_block_that_fails_on_one_rank_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    code = (
        "import shardwright\nshardwright.launch_from_torch()\nprint('joined')\nassert "
        "int(__import__('os').environ.get('RANK', 1)) == 0"
    )
    script.write_text(code)
    for ranks in (1, 2):
        codes, shown = run_forked(ranks, script, cwd=tmp_path)
        assert codes == [0, 1][-ranks:]
        assert "AssertionError" in shown
        assert shown.count("joined") == ranks


def test_options_of_blocks_are_known() -> None:
    assert {option for block in blocks("python") for option in block.options} <= {"torchrun", "after", "pair"}


def test_commands_exist() -> None:
    for block in blocks("bash"):
        for word in block.code.split():
            if word.startswith(("scripts/", "tests/", "examples/", "benchmarks/")):
                assert (ROOT / word).exists(), f"{block.where}: {word} does not exist"
    for path in DOCUMENTS:
        for verb in re.findall(r"`(?:[\w./]*/)?shardwright (\w+)", path.read_text()):
            assert verb in VERBS, f"{path.relative_to(ROOT)}: there is no `shardwright {verb}`"


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """Of headings, as GitHub and the site make them."""
    found: list[str] = []
    for title in re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.MULTILINE):
        words = re.sub(r"\]\([^)]*\)", "]", title).strip().lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return {f"{slug}-{number}" if number else slug for number, slug in _numbered(found)}


def _numbered(slugs: list[str]) -> list[tuple[int, str]]:
    return [(slugs[:place].count(slug), slug) for place, slug in enumerate(slugs)]


def test_links_lead_somewhere() -> None:
    for path in [*DOCUMENTS, ROOT / "examples" / "README.md"]:
        # code indexes and calls, which looks alike
        text = without_code(path.read_text())
        targets = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
        for target in targets:
            if re.match(r"\w+:", target):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file) if file else path
            assert there.exists(), f"{path.relative_to(ROOT)}: {target} does not exist"
            assert not anchor or anchor in anchors(there), f"{path.relative_to(ROOT)}: {target} is no heading"


def test_named_scripts_and_folders_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:scripts|docs|shardwright)/[\w./]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name} does not exist"
