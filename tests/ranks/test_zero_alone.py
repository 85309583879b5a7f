"""ZeRO on one rank, which has all shards itself: gradients go to their buffer once, in the order of streams."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shardwright import Booster
from shardwright.plugins import LowLevelZeroPlugin
from shardwright.testing import run_ranks
from shardwright.testing.device_reads import DeviceReads
from shardwright.testing.stream_model import StreamModel


class _Model(nn.Module):
    """Of which a part is used in every other step, and another never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes, self.last, self.never = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, step: int) -> Tensor:
        y = torch.tanh(self.first(x))
        y = torch.tanh(self.sometimes(y)) if step % 2 else y
        return self.last(y).square().mean()


def _alone(rank: int, world: int) -> None:
    for stage in (2, 3):
        plain = _Model()
        model = copy.deepcopy(plain)
        reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="fp32", max_norm=0.5))
        with StreamModel() as streams, DeviceReads(model.parameters()) as reads:
            boosted, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            with reads.counting():
                for step in range(4):
                    for part in range(2):
                        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + part))
                        booster.backward(boosted(x, step) / 2, optimizer)
                        (plain(x, step) / 2).backward()
                    nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                    for one in (optimizer, reference):
                        one.step()
                        one.zero_grad()
        streams.check()
        assert not [place for place in reads.places if place.startswith("agreement")], reads.places
        assert optimizer.reducer.pool.allocated == 0, "nothing is lent"
        for mine, theirs in zip(boosted.unwrap().parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_a_rank_alone_writes_gradients_once() -> None:
    run_ranks(_alone, 1, debug="OFF")
