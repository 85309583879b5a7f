"""Messages between pipeline stages that are not what the shapes of the batch say."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwright
from shardwright import Booster
from shardwright.cluster import JobError
from shardwright.pipeline.runtime import PipelineError
from shardwright.plugins import HybridParallelPlugin

from .table import mistake, refused


class _Layer(nn.Module):
    """Leaves out the last position where it is padding in every sample."""

    def __init__(self, crops: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.crops = crops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.crops and bool((x[:, -1] == 0).all()):
            x = x[:, :-1]
        return x + torch.tanh(self.linear(x))


class _Cropping(nn.Module):
    _no_split_modules = ("_Layer",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer(crops=index == 0) for index in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _batch(length: int, *padded: bool) -> torch.Tensor:
    """Two samples for each of the microbatches, some of which are padded."""
    x = torch.randn(2 * len(padded), length, 4, generator=torch.Generator().manual_seed(length))
    for index, is_padded in enumerate(padded):
        if is_padded:
            x[2 * index : 2 * index + 2, -1] = 0
    return x


class _Run:
    def __init__(self, **options: Any) -> None:
        self.plain = _Cropping()
        plugin = HybridParallelPlugin(
            pp_size=2, num_microbatches=2, precision="fp32", example_inputs=torch.randn(2, 8, 4), **options
        )
        self.booster = Booster(plugin=plugin)
        model = copy.deepcopy(self.plain)
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def step(self, batch: torch.Tensor) -> None:
        found = self.booster.execute_pipeline(
            iter([batch]), self.model, lambda outputs, _: outputs.square().sum(), self.optimizer
        )["loss"]
        self.optimizer.zero_grad()
        if found is not None:
            expected = torch.stack([self.plain(part).square().sum() for part in batch.chunk(2)]).sum()
            torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=0)


@mistake(
    symptom="a layer whose output has another shape for some batches of a shape than for others (it drops tokens by "
    "what they are)",
    gets="a step in which that happens is refused by the stage that sends, with what it has and what is expected; all "
    "ranks raise",
    fix="`enable_metadata_cache=False`: every message then tells what it is, which costs a wait of the host for each",
    worlds=(2,),
    alone=True,
)
def shapes_that_follow_from_contents(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.OFF)
    shardwright.launch(rank, world, None, None, timeout=30)
    run = _Run()
    for length in (8, 9):
        run.step(_batch(length, False, False))
    padded = _batch(10, True, True)
    parts = (
        (r"\[2, 9, 4\]", r"expected: .*\[2, 10, 4\]", "enable_metadata_cache=False") if rank == 0 else (r"rank 0 \(",)
    )
    with refused("action 0SEND_F0", *parts, by=(PipelineError, JobError)):
        run.step(padded)
    shardwright.recover()  # from then on nothing is taken to follow, and every new shape tells what it is
    run.optimizer.zero_grad()
    run.step(padded)
    careful = _Run(enable_metadata_cache=False)
    for batch in (_batch(8, False, False), _batch(9, True, False), padded, _batch(9, False, True)):
        careful.step(batch)
