"""Running statistics under plain calls of the model: those of DistributedDataParallel, rank by rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwright import Booster
from shardwright.comm.compat import world_group_for_ddp
from shardwright.plugins import HybridParallelPlugin, LowLevelZeroPlugin
from shardwright.testing import run_ranks
from tests.plugins.option_observers import recorded


class Statistics(nn.Module):
    """A batch norm, and a persistent buffer of another dtype that its forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("fixed", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += int(x.shape[0])  # type: ignore[has-type]
        return self.body(x)


def _model(rank: int) -> Any:
    """The same weights on every rank, other buffers."""
    torch.manual_seed(0)
    model: Any = Statistics().double()
    with torch.no_grad():
        model.body[1].running_mean += 1.0 + rank
        model.seen += 100 * rank
        model.fixed += rank
    return model


def _x(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3 + rank, 3, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def _plain(rank: int, world: int) -> None:
    reference: Any = DistributedDataParallel(_model(rank), process_group=world_group_for_ddp())
    step_by = torch.optim.SGD(reference.parameters(), lr=0.1)
    kept: list[dict[str, torch.Tensor]] = []
    for step in range(3):
        step_by.zero_grad()
        reference(_x(rank, step)).square().mean().backward()
        step_by.step()
        kept.append(copy.deepcopy(dict(reference.module.named_buffers())))
    for stage in (0, 2):
        model = _model(rank)
        booster = Booster(plugin=HybridParallelPlugin(precision="fp32", zero_stage=stage))
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert float(boosted.unwrap().fixed[0]) == 1.0, "boost starts all ranks from the buffers of rank 0"  # type: ignore[index, arg-type]
        assert optimizer is not None
        for expected, step in zip(kept, range(3), strict=True):
            booster.backward(boosted(_x(rank, step)).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            for name, buffer in boosted.unwrap().named_buffers():
                torch.testing.assert_close(
                    buffer, expected[name], rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
                )
        for quiet in (torch.no_grad(), booster.no_sync(boosted, optimizer)):
            with recorded() as events, quiet:
                boosted(_x(rank, 0))
            assert events == []
        boosted.eval()
        with recorded() as events:
            boosted(_x(rank, 0))
        assert events == []


def _low_level(rank: int, world: int) -> tuple[float, int]:
    model = _model(rank)
    boosted, *_ = Booster(plugin=LowLevelZeroPlugin(precision="fp32")).boost(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    return float(boosted.unwrap().body[1].running_mean[0]), int(boosted.unwrap().seen)  # type: ignore[index, arg-type, union-attr]


def _both(rank: int, world: int) -> tuple[float, int]:
    _plain(rank, world)
    return _low_level(rank, world)


def test_plain_calls_share_buffers_as_ddp_does() -> None:
    assert run_ranks(_both, 2) == [(1.0, 0), (1.0, 0)]
