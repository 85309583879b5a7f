"""Texts behind one another in a row, on ranks, token by token beside each text alone in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recipe_files import LLAMA
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.trainer.samples import IGNORED

TEXTS = ((5, 3, 6), (4, 10))  # lengths, of two rows
LAYOUTS: list[dict[str, Any]] = [
    {"tp_size": 2},
    {"pp_size": 2, "num_microbatches": 2},
    {"tp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
    {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
    {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
]


def model_and_row() -> tuple[LlamaForCausalLM, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    settings: dict[str, Any] = {**LLAMA, "initializer_range": 0.06}
    del settings["model_type"]
    model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
    ids = torch.randint(0, 250, (len(TEXTS), sum(TEXTS[0])))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in TEXTS])
    return model, {"input_ids": ids, "position_ids": positions}


def alone(model: LlamaForCausalLM, ids: torch.Tensor) -> list[list[float]]:
    """The loss of every token but each text's first one, by row."""
    found = []
    for row, lengths in zip(ids, TEXTS, strict=True):
        losses: list[float] = []
        for text in row.split(list(lengths)):
            logits = model(input_ids=text[None], use_cache=False).logits[0]
            losses += F.cross_entropy(logits[:-1], text[1:], reduction="none").tolist()
        found.append(losses)
    return found


def packed(model: LlamaForCausalLM, batch: dict[str, torch.Tensor], layout: dict[str, Any]) -> list[list[float]] | None:
    """The same of packed rows: the loss where a single token has a label. None on stages that have none."""
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32", **layout))
    boosted: Any
    boosted, *_ = booster.boost(copy.deepcopy(model))
    found: list[list[float]] = []
    for row in range(len(TEXTS)):
        found.append([])
        for place in range(batch["input_ids"].shape[1]):
            if batch["position_ids"][row, place] == 0:
                continue
            labels = torch.full_like(batch["input_ids"], IGNORED)
            labels[row, place] = batch["input_ids"][row, place]
            given = {**batch, "labels": labels}
            if "pp_size" in layout:
                loss = booster.execute_pipeline(iter([given]), boosted, None, None, return_loss=True)["loss"]
            else:
                loss = boosted(**given, use_cache=False).loss
            if loss is not None:
                found[-1].append(loss.item())
    return found if all(found) else None


def compare(rank: int, world: int) -> list[bool]:
    """Boosted without gradients, too, as a script may that only evaluates."""
    model, batch = model_and_row()
    compared = []
    with torch.no_grad():
        wanted = alone(model, batch["input_ids"])
        for layout in LAYOUTS:
            found = packed(model, batch, layout)
            compared.append(found is not None)
            for own, other in zip(found or (), wanted, strict=False):
                assert own == pytest.approx(other, abs=1e-6), layout
    return compared


def test_packed_tokens_have_the_loss_that_they_have_alone() -> None:
    everywhere = [True] * len(LAYOUTS)
    first, last = run_ranks(compare, 2)
    assert last == everywhere
    assert first == [layout.get("pp_size", 1) == 1 for layout in LAYOUTS]
