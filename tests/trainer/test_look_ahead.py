"""The next batch is made during the step, and a run that goes on sees every sample as if it had not been."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.booster import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.testing import run_ranks
from shardwright.trainer import Every, Trainer

SAMPLES, STEPS, STOP = 28, 10, 5  # 7 batches of 4 a pass


class Drawn(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of ids; with `noise` each is changed by the process's random numbers."""

    def __init__(self, noise: bool, events: list[Any]) -> None:
        rows = torch.randint(0, 64, (SAMPLES, 8), generator=torch.Generator().manual_seed(3))
        self.rows, self.noise, self.events = rows, noise, events

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.events.append(index)
        row = self.rows[index].clone()
        if self.noise:
            row[int(torch.randint(8, ()))] = int(torch.randint(64, ()))
        return {"input_ids": row, "labels": row}


def make_model(dropout: float) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=dropout))


class Stops:
    """Ends the run behind a step, as a cluster does, and keeps the losses."""

    def __init__(self, stop: int) -> None:
        self.stop, self.losses = stop, []

    def step(self, metrics: dict[str, Any]) -> None:
        self.losses.append(metrics["loss"])
        if metrics["step"] == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)

    def started(self, facts: Any) -> None: ...

    evaluated = finished = started


def train(
    folder: Path, batch: int, noise: bool, stop: int = 0, resume: bool = False, save: int | None = None
) -> tuple[list[float], list[Any], list[torch.Tensor]]:
    """Losses, what happened in which order, and the weights."""
    events: list[Any] = []
    model = make_model(0.3 if noise else 0.0)
    booster = Booster(plugin=HybridParallelPlugin(precision="fp32"))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.3)
    data: Any = booster.plugin.prepare_dataloader(Drawn(noise, events), batch_size=batch, shuffle=True, seed=7)
    model, optimizer, _, data, _ = booster.boost(model, optimizer, dataloader=data)
    told: Any = Stops(stop)
    trainer = Trainer(
        booster, model, optimizer, data, total_steps=STEPS, directory=folder, listeners=[told], save=Every(save)
    )
    taken = optimizer.step

    def step(*args: Any) -> Any:
        events.append("step")
        return taken(*args)

    optimizer.step = step
    model.module.register_forward_hook(lambda *_: events.append("forward"))
    torch.manual_seed(5)
    if resume:
        assert trainer.resume()
    trainer.train()
    return told.losses, events, [param.detach().clone() for param in model.parameters()]


def on_rank(rank: int, world_size: int, *arguments: Any) -> Any:
    return train(*arguments)


def test_the_next_batch_is_made_during_the_step(tmp_path: Path) -> None:
    _, events, _ = run_ranks(on_rank, 1, tmp_path, 4, False, 0, False, 4)[0]
    kinds = ["batch" if isinstance(event, int) else event for event in events]
    turns = "".join({"batch": "b", "forward": "f", "step": "s"}[kind] for kind in kinds).replace("bbbb", "B")
    # before a checkpoint (behind steps 4 and 8) and behind a pass (of 7) and the last step nothing is made
    assert turns == "Bf" + "Bsf" * 3 + "sBf" + "Bsf" * 2 + "sBf" + "sBf" + "Bsf" + "s"


def plain(batch: int) -> list[float]:
    model, rows = make_model(0.0), Drawn(False, []).rows
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    sampler: Any = DistributedSampler(rows, 1, 0, shuffle=True, seed=7)  # type: ignore[arg-type]
    losses: list[float] = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for ids in rows[list(sampler)].split(batch):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:STEPS]


def test_a_run_that_was_stopped_goes_on_with_the_next_sample_on_other_ranks(tmp_path: Path) -> None:
    """The batch that had been made when the signal came was of no step."""
    first = run_ranks(on_rank, 2, tmp_path, 2, False, STOP)[0][0]
    rest = run_ranks(on_rank, 1, tmp_path, 4, False, 0, True)[0][0]
    assert len(first) == STOP
    assert [*first, *rest] == pytest.approx(plain(4), abs=1e-5)


def test_random_numbers_of_samples_and_dropout_go_on_where_they_were(tmp_path: Path) -> None:
    whole, _, weights = run_ranks(on_rank, 1, tmp_path / "whole", 4, True)[0]
    first = run_ranks(on_rank, 1, tmp_path / "cut", 4, True, STOP)[0][0]
    rest, _, again = run_ranks(on_rank, 1, tmp_path / "cut", 4, True, 0, True)[0]
    assert [*first, *rest] == whole
    assert all(torch.equal(one, other) for one, other in zip(weights, again, strict=True))
