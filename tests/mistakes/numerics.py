"""Losses that are not numbers."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwright import Booster
from shardwright.interface import NonFiniteLoss

from .data import boosted, own_loss, plugin, said, texts
from .table import mistake, refused


def not_a_number(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs.loss * math.nan


def train_with_nan(world: int, on_nan: str) -> tuple[Any, list[torch.Tensor], list[torch.Tensor], Any]:
    """A good step, a bad one; the weights after each."""
    facade, model, optimizer = boosted(plugin(world), on_nan=on_nan)
    after = []
    error = None
    for criterion in (own_loss, not_a_number, own_loss):
        try:
            facade.execute_pipeline(iter([texts()]), model, criterion, optimizer)
            optimizer.step()
        except NonFiniteLoss as caught:
            error = caught
        optimizer.zero_grad()
        after.append(model.unwrap().model.layers[0].mlp.up_proj.weight.detach().clone())  # type: ignore[operator, union-attr]
    return error, *after  # type: ignore[return-value]


@mistake(
    symptom="a loss that is nan or inf",
    gets="the optimizer steps as torch's would, and the log names the step: by default nothing is decided for you",
    fix="`Booster(on_nan='skip')` or `'stop'` while you look for the cause: data of that step, learning rate, number "
    "format",
)
def nan_loss(rank: int, world: int) -> None:
    with said("the loss of step 2 is nan", "on_nan='skip'", by=None):
        _, first, second, _ = train_with_nan(world, "warn")
    assert first.isfinite().all()
    assert not second.isfinite().all()


@mistake(
    symptom="the same with `Booster(on_nan='skip')`",
    gets="the step is left out on all ranks, weights and states stay as they are, and the log counts such steps",
    fix="nothing to do, if there are few",
)
def nan_loss_skipped(rank: int, world: int) -> None:
    with said("the loss of step 2 is not finite", "left out on all ranks, 1 so far"):
        _, first, second, third = train_with_nan(world, "skip")
    assert torch.equal(first, second)
    assert third.isfinite().all()
    assert not torch.equal(second, third)


@mistake(
    symptom="the same with `Booster(on_nan='stop')`",
    gets="`NonFiniteLoss` on all ranks before the optimizer steps, with the number of the step",
    fix="`detect_anomaly='name'` beside it says which row, parameter or operator it came from; the weights are "
    "still good",
)
def nan_loss_stops(rank: int, world: int) -> None:
    error, first, second, _ = train_with_nan(world, "stop")
    assert "the loss of step 2 is not finite" in str(error)
    assert torch.equal(first, second)


@mistake(
    symptom="`Booster(on_nan='ignore')`, or another word that it does not know",
    gets="refused with the words there are",
    fix="`on_nan='warn'`, `'skip'` or `'stop'`",
)
def unknown_policy(rank: int, world: int) -> None:
    with refused("on_nan='ignore'", "'warn', 'skip', 'stop'"):
        Booster(on_nan="ignore")


@mistake(
    symptom="`Booster(detect_anomaly='name')` by itself, which takes steps without waiting for other ranks",
    gets="refused: to say where a number came from all ranks run the step once more before weights change",
    fix="`on_nan='stop'` or `'skip'` with it",
)
def named_without_waiting(rank: int, world: int) -> None:
    with refused("detect_anomaly='name' with on_nan='warn'", "on_nan='stop' or 'skip'"):
        Booster(detect_anomaly="name")
