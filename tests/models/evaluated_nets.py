"""Toy models that read, return or keep in evaluation what they do not in training, and the other way round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.side_doors import WIDTH, Block, Net


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ScoresToo(Net):
    """Logits, and the scores of a second head, which reads what a first layer and the words have given."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        each = []
        for layer in self.layers:
            x = layer(x)
            each.append(x)
        logits = self.head(x)
        found = {"loss": loss_of(logits, labels)}
        if not self.training:
            found |= {"logits": logits, "scores": self.second(each[0] + self.words(input_ids))}
        return found


class Reads(Net):
    """Inner values of layers, in evaluation."""

    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            if not self.training:
                beside.append(x)
            return super().forward(x)

    def beside(self, x: Tensor) -> Any:
        return []

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        return x + torch.stack(beside).mean(0) if beside else x


class WeightsOfALayer(Net):
    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        return x if self.training else x * self.layers[0].norm.weight


class Counts(Net):
    """How often it was evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations = 0

    def beside(self, x: Tensor) -> Any:
        if not self.training:
            self.evaluations += 1
            x.mul_(1 + 0.1 * self.evaluations)


class ReturnsMore(Net):
    """A second value of each layer, in training."""

    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Any:
            y = super().forward(x)
            return (y, y.mean()) if self.training else y

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
            x = x[0] if self.training else x
        logits = self.head(x)
        return {"loss": loss_of(logits, labels), "logits": logits}


@dataclass(frozen=True)
class Inner:
    first: Tensor
    name: str


@dataclass
class Found:
    """What a script returns that knows no dicts."""

    loss: Tensor
    logits: Tensor
    inner: Inner


class ReturnsObjects(Net):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = first = self.layers[0](self.words(input_ids))
        for layer in self.layers[1:]:
            x = layer(x)
        logits = self.head(x)
        return Found(loss_of(logits, labels), logits, Inner(first, "of the first layer"))


RIGHT: tuple[type[Net], ...] = (ScoresToo, Counts, ReturnsObjects)

# Net -> what its refusal says, in evaluation, over two stages.
REFUSED: dict[type[Net], str] = {
    Reads: r"in evaluation .*layers\.0 changes the list that it gets as its argument number 2, and layers\.2 reads it",
    WeightsOfALayer: r"in evaluation .*what lies behind the layers computes with parameters of layers\.0 by itself",
    ReturnsMore: r"in evaluation .*layers\.0 returns a tensor, and 2 values, 2 of them tensors where the model was cut",
}
