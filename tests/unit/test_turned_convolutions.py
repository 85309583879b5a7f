"""Convolutions of a class with a forward of its own, which turns what it reads: they are no ends of what feeds what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.shardformer.feeding import find_feedings


class TurnedHead(nn.Conv1d):
    """[N, T, C] -> [N, T, C']"""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Gated(nn.Module):
    """[N, T, 8] -> [N, T, 5]: a pair of convolutions with gates and a norm between, then the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 32, 1)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Conv1d(16, 8, 1)
        self.head = TurnedHead(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.second(self.norm(nn.functional.glu(self.first(x.transpose(1, 2)), 1)))
        return self.head(found.transpose(1, 2))


def test_a_pair_is_found_before_a_head_that_turns_its_input() -> None:
    torch.manual_seed(0)
    found = find_feedings(Gated().double(), {"x": torch.randn(3, 7, 8, dtype=torch.float64)}, lambda name: False)
    (feeding,) = found.feedings
    assert dict(feeding.columns) == {"first": 2}
    assert feeding.rows == ("second",)
    assert feeding.between == ("norm",)
