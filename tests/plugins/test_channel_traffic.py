"""Collectives of convolutions that the layout report tells are those that a recorder counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer.convolution import ConvColumn, ConvGroups, ConvRow
from shardwright.shardformer.policies.base import Policy
from shardwright.shardformer.styles import Style
from shardwright.testing import adamw, run_ranks
from shardwright.testing.calls import Call, CallWatch


class Sounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.first, self.second = nn.Conv1d(6, 12, 3, padding=1), nn.Conv1d(12, 8, 3, padding=1)
        self.whole, self.groups = nn.Conv1d(8, 8, 1), nn.Conv1d(8, 8, 3, padding=1, groups=4)
        self.split, self.out = nn.Conv1d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.movedim(1, -1)).movedim(-1, 1)
        x = self.second(F.gelu(self.first(x)))
        x = self.split(self.groups(self.whole(x).softmax(1)).softmax(1))
        found: Tensor = self.out(x.mean(-1).softmax(-1))
        return found


class ByChannels(Policy):
    def rules(self) -> Mapping[str, Style | str]:
        return {
            "first": ConvColumn(),
            "second": ConvRow(),
            "whole": ConvColumn(gather_output=True),
            "groups": ConvGroups(gather_output=True),
            "split": ConvRow(split_input=True),
        }


class Counted(CallWatch):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = Counter[str]()

    def called(self, call: Call, reads: list[Tensor], writes: list[Tensor]) -> None:
        if call.place.startswith(("ops/collective.py", "comm/collectives.py")):
            self.kinds["all-reduce" if "reduce" in call.kind else "all-gather"] += 1


def counted(rank: int, world: int) -> tuple[dict[str, int], dict[str, Any]]:
    torch.manual_seed(0)
    model = Sounds()
    plugin = HybridParallelPlugin(tp_size=world, custom_policy=ByChannels(), precision="fp32")
    boosted, optimizer, *_ = (booster := Booster(plugin=plugin)).boost(model, adamw(model.parameters()))
    x, target = torch.randn(4, 6, 14), torch.arange(4)
    with Counted() as seen:
        for _ in range(2):
            seen.kinds.clear()
            booster.backward(F.cross_entropy(boosted(x), target), optimizer)
    assert plugin.layout is not None
    told = {each.what.rpartition(", ")[2]: each.count for each in plugin.layout.traffic if each.axis == "tp"}
    return dict(seen.kinds), told


def test_sums_and_gathers_of_channels_are_counted() -> None:
    for seen, told in run_ranks(counted, 2, timeout=120):
        assert seen == told == {"all-reduce": 4, "all-gather": 4}
