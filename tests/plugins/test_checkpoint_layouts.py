"""Save after two steps at one layout, load at another, two more steps: the same as one process that was never
interrupted.

The whole matrix: pytest -m sweep tests/plugins/test_checkpoint_layouts.py (about 15 minutes on two cores).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_ranks import LAYOUTS, load_at, save_at

from shardwright.testing import run_ranks

# Model, layouts saved at, layouts loaded at: each feature (fused qkv, tied weights, odd labels, shared tables) at the
# layouts that cut it.
CASES = [
    ("llama-causal-lm", ["tp2", "zero2", "zbv-tp2"], ["one", "tp4", "tp2-zero3"]),
    ("gpt2-causal-lm", ["tp4", "zero3"], ["tp2-pp2", "zero1-k2"]),
    ("qwen2-tied-causal-lm", ["tp2-pp2", "zero1-k2"], ["pp2-chunks2-zero1", "tp2"]),
    ("bert-token-classification", ["tp2", "pp2-chunks2-zero1"], ["zero3", "tp4"]),
    ("t5-conditional-generation", ["pp2", "tp2-zero3"], ["zero1", "tp2-pp2"]),
]


def run(model: str, sources: list[str], targets: list[str], path: Path, timeout: float) -> None:
    for layout in sources:
        run_ranks(save_at, LAYOUTS[layout][0], model, layout, path, timeout=timeout)
    for layout in targets:
        run_ranks(load_at, LAYOUTS[layout][0], model, layout, path, sources, timeout=timeout)


@pytest.mark.parametrize(("model", "sources", "targets"), CASES, ids=[case[0] for case in CASES])
def test_going_on_at_another_layout(model: str, sources: list[str], targets: list[str], tmp_path: Path) -> None:
    run(model, sources, targets, tmp_path, 100)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", [case[0] for case in CASES])
def test_every_pair_of_layouts(model: str, tmp_path: Path) -> None:
    run(model, list(LAYOUTS), list(LAYOUTS), tmp_path, 600)
