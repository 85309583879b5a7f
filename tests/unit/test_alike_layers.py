"""Where only shapes are asked one of the layers that are alike runs, unless a later one needs what they leave."""

from __future__ import annotations

import torch
from torch import nn

from shardwright.models.layer_chain import applied
from shardwright.pipeline.loss.check import LossCheck


class Sharing(nn.Module):
    """A layer that keeps what it has projected for a later one, or takes what an earlier one has kept."""

    def __init__(self, keeps_at: int | None = None, takes_at: int | None = None) -> None:
        super().__init__()
        self.inner, self.keeps_at, self.takes_at, self.calls = nn.Linear(8, 8), keeps_at, takes_at, 0

    def forward(self, stacked: torch.Tensor, kept: dict[int, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        found = self.inner(stacked) if self.takes_at is None else kept[self.takes_at]
        if self.keeps_at is not None:
            kept[self.keeps_at] = found
        return stacked + found


class Net(nn.Module):
    """Copies of the residual are stacked in front of the samples, [2, B, T, C]; the head reads the first one."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        places = [(None, None), (1, None), (None, None), (None, 1 if shares else None)]
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Sharing(*place) for place in places)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, kept = self.first(x), {}
        hidden = torch.stack([x, 2 * x])
        for layer in self.layers:
            hidden = layer(hidden, kept)
        logits = self.head(hidden[0])
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def check_of(net: Net) -> tuple[LossCheck, list[int]]:
    """After a verdict, with how often each layer ran for it."""
    check = LossCheck(net, applied(f"layers.{number}" for number in range(4)))
    batch = {"x": torch.randn(3, 6, 8), "labels": torch.randint(0, 5, (3, 6))}
    verdict = check.check(None, [batch], [0], weighed=True, training=True)[0]
    assert verdict.followed
    assert verdict.dims == (1,)
    return check, [layer.calls for layer in check.model.layers]


def test_one_of_a_kind_runs() -> None:
    _, calls = check_of(Net(shares=False))
    assert calls[0]
    assert not any(calls[1:3])


def test_layers_that_leave_something_behind_run_all() -> None:
    check, calls = check_of(Net(shares=True))
    assert all(calls)
    more = {"x": torch.randn(2, 4, 8), "labels": torch.randint(0, 5, (2, 4))}
    assert check.check(None, [more], [1], weighed=True, training=True)[0].followed
