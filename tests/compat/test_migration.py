"""The pages of docs/migration: what a script was and what it becomes come to the same losses on two ranks.

Blocks that begin with ```python pair=before and ```python pair=after run one after the other in the same processes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked_scripts import run_forked
from tests.unit.test_docs import blocks

PAIRS: dict[str, dict[str, str]] = {}
for _block in blocks("python"):
    if "pair" in _block.options:
        PAIRS.setdefault(_block.where.partition(":")[0], {})[_block.options["pair"]] = _block.code

# `import colossalai` of a page is answered as in the scripts that it is about.
COMPARE = """
import runpy

import shardwright.compat.colossalai
import torch

if "import deepspeed" in open("before.py").read():
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles an all-reduce
before = runpy.run_path("before.py")["losses"]
after = runpy.run_path("after.py")["losses"]
print("before", before, "after", after)
if after:  # the last stage has the loss, or the first rank is told of it
    torch.testing.assert_close(torch.tensor(after), torch.tensor(before), rtol=1e-5, atol=1e-5)
    print("compared", len(after))
"""


def test_pages_have_both_sides() -> None:
    assert {Path(page).stem for page in PAIRS} == {"colossalai", "accelerate", "trainer", "deepspeed"}
    assert all(set(pair) == {"before", "after"} for pair in PAIRS.values())


# deepspeed takes long to import
SWEEP = {"docs/migration/deepspeed.md": (pytest.mark.sweep,)}


@pytest.mark.parametrize("page", [pytest.param(page, marks=SWEEP.get(page, ())) for page in PAIRS])
def test_before_and_after_come_to_the_same(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    for side, code in PAIRS[page].items():
        (tmp_path / f"{side}.py").write_text(code)
    script = tmp_path / "compare.py"
    script.write_text(COMPARE)
    codes, printed = run_forked(2, script, cwd=tmp_path)
    assert codes == [0, 0], printed
    assert re.search(r"compared [1-9]", printed), printed
