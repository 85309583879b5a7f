"""Weight gradients of a compiled layer that wait for a schedule: which do, which do not, and their numbers."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.ops import layer_graphs
from shardwright.ops.layer_graphs import LayerGraph
from shardwright.ops.weight_grad import WeightGradStore


class Block(nn.Module):
    """A linear, one of Conv1D's form, a batched product, a weight used twice and one that another multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(6)
        self.up = nn.Linear(6, 10)
        self.turned = nn.Parameter(torch.randn(10, 8))
        self.experts = nn.Parameter(torch.randn(2, 4, 6))
        self.twice = nn.Linear(6, 6, bias=False)
        self.inner, self.outer = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = F.silu(self.up(self.norm(x))) @ self.turned
        y = torch.bmm(inside.flatten(0, 1).unflatten(-1, (2, 4)).transpose(0, 1), self.experts).sum(0)
        return x + self.twice(self.twice(y.view_as(x))) @ (self.inner @ self.outer)


WAIT = {"up.weight", "turned", "experts"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_products_wait(backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(layer_graphs, "backend", backend)
    torch.manual_seed(0)
    plain = Block().double()
    with torch.no_grad():
        plain.up.weight.mul_(3)
    model = copy.deepcopy(plain)
    assert isinstance(layer_graphs.Kinds(apart=True).compile(model), LayerGraph)
    names = {param: name for name, param in model.named_parameters()}
    told: list[str] = []
    model.twice.weight.register_hook(lambda gradient: told.append("twice"))
    store = WeightGradStore()
    with caplog.at_level(logging.WARNING):
        for number, waits in enumerate((True, True, False)):  # of another length; with no schedule
            x = torch.randn(2, 5 + number, 6, dtype=torch.float64)
            loss = (model(x.requires_grad_()) ** 2).sum()
            if waits:
                with store.deferring(number):
                    loss.backward()
                assert {names[param] for param in store.parameters(number)} == WAIT
                assert store.bytes
            else:
                loss.backward()
            found, x.grad = x.grad, None
            (plain(x) ** 2).sum().backward()
            torch.testing.assert_close(found, x.grad, rtol=1e-10, atol=1e-10)
    assert all(dict(model.named_parameters())[name].grad is not None for name in WAIT)  # of the last
    for number in range(2):
        store.run(number)
    assert not store.bytes
    for name, param in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, param.grad, rtol=1e-10, atol=1e-10, msg=name)
    said = [record.getMessage() for record in caplog.records if "fill no bubble" in record.getMessage()]
    at_once = {name for each in said for name in each.split("the gradients of ")[1].split(" are ")[0].split(", ")}
    assert at_once == {"twice.weight", "inner", "outer"}, said
    assert told
