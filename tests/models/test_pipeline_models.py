"""HuggingFace models through pipelines of rank processes: loss, outputs, every gradient and every updated weight in float64."""

from __future__ import annotations

import pytest

from shardwright.testing import run_ranks, zoo
from pipeline_cases import Case, run_cases

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "bert", "t5")


def run(cases: list[Case], ranks: int = 2, dp: int = 1) -> None:
    held = run_ranks(run_cases, ranks, cases, dp, timeout=100)
    for index, case in enumerate(cases):
        names = {name for name, _ in zoo.build(case.name).named_parameters()}
        assert set().union(*(rank[index] for rank in held)) == names, f"{case}: parameters that no rank holds"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_head(family: str) -> None:
    run([Case(name) for name in zoo.names(family=family)])


STYLES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb", 1), ("zbv", 2))


@pytest.mark.parametrize("name", ["llama-tied-causal-lm", "bert-masked-lm", "t5-conditional-generation"])
def test_every_schedule(name: str) -> None:
    run([Case(name, style, chunks, checkpointing=ratio) for style, chunks in STYLES for ratio in (None, 0.5)])
