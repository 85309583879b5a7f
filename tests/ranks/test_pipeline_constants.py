"""Layers that hand on Python numbers: what travels over a cut is this microbatch's, not the dry run's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwright.pipeline.cut.plan import cut_model
from shardwright.pipeline.executor import PipelineExecutor
from shardwright.pipeline.settings import PipelineSettings
from shardwright.testing import run_ranks


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.index = index

    def forward(self, x: torch.Tensor, scale: float, seen: dict[str, Any]) -> Any:
        """A number from the shape, an int and a truth value from the data, which changes between messages of equal
        shape.
        """
        x = x + self.linear(x) * scale * (2 if seen["even"] else 1) + seen["tokens"] / 100
        tokens = seen["tokens"] + self.index
        return x, x.shape[1] / 4.0, {"tokens": tokens, "even": tokens % 2 == 0, "name": None}


class Net(nn.Module):
    _no_split_modules = ["Layer"]
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer(index) for index in range(4))
        self.head = nn.Linear(8, 64, dtype=torch.float64)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x, scale, seen = self.embed(input_ids), 1.0, {"tokens": int(input_ids[0, 0]), "even": False}
        for layer in self.layers:
            x, scale, seen = layer(x, scale, seen)
        return {"logits": self.head(x)}


def criterion(outputs: Any, inputs: Any) -> torch.Tensor:
    return outputs["logits"].square().mean()


def run(rank: int, world: int, style: str, chunks: int) -> None:
    model, reference = Net(), Net()
    settings = PipelineSettings(style, chunks, num_microbatches=4)
    executor = PipelineExecutor(cut_model(model, settings, rank, world), settings, pipe_group=dist.group.WORLD)
    ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    expected = sum(criterion(reference(one), None) for one in ids.split(1)) / 4
    expected.backward()
    found = executor.execute(iter([{"input_ids": ids}]), criterion, torch.optim.SGD(model.parameters(), lr=0.1))["loss"]
    if found is not None:
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
    there = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, there[name].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("style", "chunks"), [("1f1b", 1), ("interleaved", 2)])
def test_numbers_of_every_microbatch_cross_the_cut(style: str, chunks: int) -> None:
    run_ranks(run, 2, style, chunks)
