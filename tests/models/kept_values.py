"""Toy models that keep numbers, objects and statistics from one forward for the next one, or one layer for another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.side_doors import WIDTH, WORDS, Block, Net


class CountsBefore(Net):
    """Every stage counts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def beside(self, x: Tensor) -> Any:
        self.steps += 1
        x.mul_(1 + 0.1 * self.steps)


class CountsBehind(CountsBefore):
    def beside(self, x: Tensor) -> Any:
        x.mul_(1 + 0.1 * self.steps)

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        self.steps += 1
        return x


class CountsAtTheEnd(CountsBefore):
    def beside(self, x: Tensor) -> Any:
        return None

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        self.steps += 1
        return x * (1 + 0.1 * self.steps)


class CountsBetween(CountsBefore):
    """Stages that end before the count rises would read an old one."""

    def beside(self, x: Tensor) -> Any:
        return None

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        self.steps += number == 2
        return x * (1 + 0.1 * self.steps)


class CountsInABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def beside(self, x: Tensor) -> Any:
        self.steps += 1
        x.mul_(1 + 0.1 * self.steps)


class Remembers(Net):
    """The end of a forward is where the next one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def beside(self, x: Tensor) -> Any:
        if self.last is not None:
            x += self.last

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        self.last = x.detach().mean()
        return x


class LayersCount(Net):
    """Each layer for itself."""

    class block(Block):
        calls = 0

        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls)


class LayerTells(Net):
    """The model reads a number off its first layer."""

    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            self.width = float(x.shape[-1])
            return super().forward(x)

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        return x * getattr(self.layers[0], "width", 0.5)


class LayersShareDict(Net):
    kept: Any = dict

    class block(Block):
        shared: Any

        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            if self.number == 0:
                self.shared["scale"] = 1.5
            return super().forward(x) * self.shared.get("scale", 1.0)

    def __init__(self) -> None:
        super().__init__()
        shared = self.kept()
        for layer in self.layers:
            layer.shared = shared


class Notes:
    scale = 1.0


class LayersShareObject(LayersShareDict):
    kept = Notes

    class block(Block):
        shared: Any

        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            if self.number == 0:
                self.shared.scale = 1.5
            return super().forward(x) * self.shared.scale


class LayersShareNamespace(LayersShareObject):
    @staticmethod
    def kept() -> Any:
        return SimpleNamespace(scale=1.0)


class SetsOnce(Net):
    """What the first forward sets for all that come, in front of those who read it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None

    def beside(self, x: Tensor) -> Any:
        if self.scale is None:
            self.scale = 1.5
        return self.scale

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        return x * beside


class OneMemory(Net):
    """Layers return two tensors of one memory, and the model writes to one."""

    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Any:
            x = super().forward(x).clone()
            return x, x.view(-1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x, flat = layer(x)
            with torch.no_grad():
                x.mul_(1.5)
            x = x + flat.view_as(x) * 0.3
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Turned(nn.BatchNorm1d):
    """Of tokens [samples, tokens, features]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Statistics(Net):
    """Of what comes before the layers, and of what lies behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Sequential(nn.Embedding(WORDS, WIDTH), Turned(WIDTH))
        self.head = nn.Sequential(Turned(WIDTH), nn.Linear(WIDTH, WORDS))


# Net -> what its refusal says, over two stages.
REFUSED: dict[type[Net], str] = {
    CountsBehind: r"what lies behind the layers sets steps, which the model, before layers\.0, reads",
    CountsBetween: r"the model, before layers\.3, sets steps, which the model, before layers\.1, reads",
    Remembers: r"what lies behind the layers sets last, which the model, before layers\.0, reads",
    LayerTells: r"layers\.0 sets layers\.0\.width, which what lies behind the layers reads",
    LayersShareDict: r"layers\.0 sets layers\.0\.shared, which layers\.[23] reads",
    LayersShareObject: r"layers\.0 sets layers\.0\.shared\.scale, which layers\.[23] reads",
    LayersShareNamespace: r"layers\.0 sets layers\.0\.shared\.scale, which layers\.[23] reads",
    OneMemory: r"layers\.1 returns several tensors of one memory, to one of which the model writes, and layers\.2",
}

# Those that rise twice with a microbatch where a rank has two stages.
COUNTED: tuple[type[Net], ...] = (CountsBefore, CountsInABuffer)

RIGHT: tuple[type[Net], ...] = (*COUNTED, CountsAtTheEnd, LayersCount, SetsOnce, Statistics)
