"""LoRA on families without a policy of their own, whose plans are made for the model inside of peft's wrappers: loss,
gradients and updated weights of the adapters against one process.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.testing import run_ranks
from shardwright.testing.matrix import Axis, Subject
from shardwright.testing.matrix.cell import is_refusal, run_cell
from shardwright.testing.matrix.subject import build
from tests.models.matrix.rows import FAMILIES, family_rows

TP: dict[str, Any] = {"tp_size": 2}
PP: dict[str, Any] = {"pp_size": 2, "num_microbatches": 2}


def adapted(rank: int, world: int, subject: Subject, layout: dict[str, Any]) -> str:
    try:
        cell = run_cell(build(subject), Axis("lora", "LoRA", layout, world, "lora"))
    except ValueError as error:
        if not is_refusal(error):
            raise
        return f"refused: {error}"
    return f"{cell['outcome']} {cell.get('why', '')}".strip()


def test_a_vision_model_is_adapted_on_tensor_parallel_stages() -> None:
    assert set(run_ranks(adapted, 4, Subject("ViTForImageClassification"), {**TP, **PP})) == {"verified"}


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", [TP, PP, {**TP, **PP}], ids=["tp2", "pp2", "tp2_pp2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, layout: dict[str, Any]) -> None:
    world = layout.get("tp_size", 1) * layout.get("pp_size", 1)
    for row in filter(lambda row: row.first, family_rows(family)):
        for found in run_ranks(adapted, world, row.subject, layout, timeout=200):
            assert found.startswith(("verified", "refused")), found
