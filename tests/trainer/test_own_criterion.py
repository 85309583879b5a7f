"""A Trainer that is subclassed for another objective, or given one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.trainer import Trainer

STEPS, RATE = 3, 0.1


def smoothed(outputs: Any, inputs: Any) -> torch.Tensor:
    """The mean over the tokens that have a target."""
    return F.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), inputs["targets"][:, 1:].flatten(), label_smoothing=0.2
    )


class SmoothedTrainer(Trainer):
    def criterion(self, outputs: Any, inputs: Any) -> torch.Tensor:
        return smoothed(outputs, inputs)


class Notes:
    def __init__(self) -> None:
        self.losses: list[float] = []

    def started(self, facts: Any) -> None: ...

    def evaluated(self, metrics: Any) -> None: ...

    def finished(self, facts: Any) -> None: ...

    def step(self, metrics: Any) -> None:
        self.losses.append(metrics["loss"])


def start() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    ids = torch.randint(64, (4 * STEPS, 12))
    targets = ids.clone()
    for row, length in enumerate(range(4, 4 + len(ids))):
        targets[row, min(length, 11) :] = -100  # unequal numbers of them in microbatches and on ranks
    return model, [{"input_ids": row, "targets": target} for row, target in zip(ids, targets, strict=True)]


def train_on_rank(rank: int, world_size: int, subclassed: bool, folder: str) -> list[float]:
    model, samples = start()
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32")
    loader = plugin.prepare_dataloader(samples, batch_size=4)
    booster = Booster(plugin=plugin)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    model, boosted, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    notes = Notes()
    given = {} if subclassed else {"criterion": smoothed}
    kind = SmoothedTrainer if subclassed else Trainer
    trainer = kind(booster, model, boosted, loader, total_steps=STEPS, directory=folder, listeners=[notes], **given)
    trainer.train()
    return notes.losses


@pytest.mark.parametrize("subclassed", [True, False], ids=["overridden", "passed"])
def test_losses_are_those_of_a_plain_loop(subclassed: bool, tmp_path: Path) -> None:
    model, samples = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    expected = []
    for step in range(STEPS):
        rows = samples[4 * step : 4 * step + 4]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = smoothed(model(input_ids=batch["input_ids"]), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    found = run_ranks(train_on_rank, 2, subclassed, str(tmp_path))[0]
    assert found == pytest.approx(expected, rel=1e-5)
