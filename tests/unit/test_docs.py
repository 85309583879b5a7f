"""README and docs say what is true: their code runs, their commands and links exist.

A block that begins with ```python runs as one process, ```python torchrun=2 on two ranks, ```python torchrun=1,4 as one process and on
four ranks: with what torchrun tells its ranks, which tests/examples and tests/ranks/test_demo.py start by torchrun itself.
```python after=demo needs the results of a demo run and is run by tests/ranks/test_demo.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from block_process import run_block

from shardwright.cli.main import VERBS
from shardwright.testing.ranks import fork_server

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


LIMIT = 110.0  # seconds
PYTHON = [block for block in blocks("python") if "after" not in block.options]


@pytest.mark.parametrize("block", PYTHON, ids=[block.where for block in PYTHON])
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block.code)
    for ranks in map(int, block.options.get("torchrun", "1").split(",")):
        # What starts ranks by itself is a script of a user's to the end: the server that forks them is its own.
        failed = run_alone(script) if "run_ranks" in block.code else run_forked(script, ranks)
        assert not failed, f"{block.where} on {ranks} rank(s)\n{failed}"


def run_alone(script: Path) -> str:
    done = subprocess.run([sys.executable, script], cwd=script.parent, env=environment(), capture_output=True, text=True, timeout=LIMIT)
    return f"{done.stdout}\n{done.stderr}" if done.returncode else ""


def run_forked(script: Path, ranks: int) -> str:
    """`script` on `ranks` ranks under the variables that torchrun gives; returns what failed, or an empty text."""
    # As torchrun's agent does it: the store is the starter's, on a port that was free when it was taken.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    outputs = [script.with_name(f"output-{ranks}-{rank}") for rank in range(ranks)]
    started = [fork_server().Process(target=run_block, args=(script, outputs[rank], as_rank(rank, ranks, store))) for rank in range(ranks)]
    deadline = time.monotonic() + LIMIT
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in started]  # None: it still runs
    finally:
        for process in started:
            process.kill()
            process.join()
    return "" if not any(code != 0 for code in codes) else f"{codes}\n" + "\n".join(path.read_text() for path in outputs if path.exists())


def as_rank(rank: int, ranks: int, store: dist.TCPStore | None) -> dict[str, str]:
    if store is None:
        return environment()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": store.port}
    agent = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**environment(), **agent, **{name: str(number) for name, number in names.items()}}


def environment() -> dict[str, str]:
    """One thread per rank, no GPU, this tree's package."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_a_block_that_fails_on_one_rank_is_shown(tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    code = "import shardwright\nshardwright.launch_from_torch()\nprint('joined')\nassert int(__import__('os').environ.get('RANK', 1)) == 0"
    script.write_text(code)
    for ranks in (1, 2):
        shown = run_forked(script, ranks)
        assert "AssertionError" in shown
        assert shown.count("joined") == ranks


def test_options_of_blocks_are_known() -> None:
    assert {option for block in blocks("python") for option in block.options} <= {"torchrun", "after"}


def test_commands_exist() -> None:
    for block in blocks("bash"):
        for word in block.code.split():
            if word.startswith(("scripts/", "tests/", "examples/", "benchmarks/")):
                assert (ROOT / word).exists(), f"{block.where}: {word} does not exist"
    for path in DOCUMENTS:
        for verb in re.findall(r"`(?:[\w./]*/)?shardwright (\w+)", path.read_text()):
            assert verb in VERBS, f"{path.relative_to(ROOT)}: there is no `shardwright {verb}`"


def test_links_lead_somewhere() -> None:
    for path in DOCUMENTS:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)  # code indexes and calls, which looks alike
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
            if not re.match(r"\w+:", target):
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target} does not exist"


def test_named_scripts_and_folders_exist() -> None:
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:scripts|docs|shardwright)/[\w./]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)}: {name} does not exist"
