"""Toy models whose layers hand something on past what they return, or that write to what they have returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, WIDTH, LENGTH, SAMPLES = 19, 10, 7, 5


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x: Tensor, beside: Any = None) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Words, four blocks, a head; what its blocks get beside the hidden states is `beside`."""

    _no_split_modules = ("Block",)
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(self.block(number) for number in range(4))

    def beside(self, x: Tensor) -> Any:
        return None

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        return x

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        first = x = self.words(input_ids)
        beside = self.beside(x)
        for number, layer in enumerate(self.layers):
            x = layer(x, beside)
            first = x if number == 0 else first
            x = self.between(x.clone(), number, first, beside)  # what is written to must not be saved for a gradient
        logits = self.head(self.behind(x, first, beside))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 1:] = labels[2, :3] = -100  # so that microbatches weigh differently
    return {"input_ids": ids, "labels": labels}


# Those that no cut can make right -------------------------------------------------------------------------------------


class History(Net):
    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            beside.append(x)
            return super().forward(x)

    def beside(self, x: Tensor) -> Any:
        return []

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        return x + torch.stack(beside).mean(0)


class Cached(Net):
    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            if self.number == 1:
                beside["k"] = x
            return super().forward(x + beside["k"] if self.number == 3 else x)

    def beside(self, x: Tensor) -> Any:
        return {}


class Counted(Net):
    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            beside["calls"] += 1
            return super().forward(x * beside["calls"])

    def beside(self, x: Tensor) -> Any:
        return {"calls": 0}


class Popped(Net):
    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            return super().forward(x + beside.pop())

    def beside(self, x: Tensor) -> Any:
        return [x * number for number in range(4)]


class OtherInPlace(Net):
    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            beside.add_(x.detach().mean())
            return super().forward(x)

    def beside(self, x: Tensor) -> Any:
        return torch.zeros(1, dtype=x.dtype)

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        return x * (1 + beside)


class BufferInPlace(Net):
    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            if self.number == 2:
                beside.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))

    def beside(self, x: Tensor) -> Any:
        x.add_(self.mean)  # of the step before
        return self.mean


class InputInPlace(Net):
    """The second layer writes to what the first has returned, which the head reads."""

    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            if self.number == 1:
                x += 1.0
            return super().forward(x.clone())

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        return first if number == 0 else x

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        return x + first


# Net -> what its refusal says.
REFUSED: dict[type[Net], str] = {
    History: r"layers\.0 changes the list that it gets as its argument number 2, and layers\.2 reads it",
    Cached: r"layers\.1 changes the dict that it gets as its argument number 2, and layers\.3 reads it",
    Counted: r"layers\.0 changes the dict that it gets as its argument number 2, and layers\.2 reads it",
    Popped: r"layers\.0 changes the list that it gets as its argument number 2, and layers\.2 reads it",
    OtherInPlace: r"layers\.0 writes in place to a tensor that it has not made, and what lies behind the layers reads",
    BufferInPlace: r"layers\.2 writes to the buffer mean, which layers\.0 reads",
    InputInPlace: r"layers\.1 writes in place to a tensor that it has not made, and what lies behind the layers reads",
}


# Those that a cut makes right -----------------------------------------------------------------------------------------


class WrittenBetween(Net):
    """Every stage does again what is written between layers, to what was returned."""

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number == 1:
            first *= 1.5
        return x + first if number == 3 else x


class DataWrite(Net):
    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number == 1:
            first.data.mul_(1.5)
        return x + first if number == 3 else x


class ViewWrite(Net):
    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number == 1:
            first[:, 0].fill_(0.5)
        return x + first if number == 3 else x


class KeptBefore(Net):
    """What was read before the write stays what it was."""

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number == 0:
            self.kept = first.clone()
            first += 1.0
        return x + self.kept * 0.3 + first if number == 3 else x


class DataRead(Net):
    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        return x + first.data.mean((1, 2), keepdim=True) if number == 2 else x


class Mapped(Net):
    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number != 2:
            return x
        scale: Callable[[Tensor], Tensor] = torch.vmap(lambda one: one.detach().mean() > 0)
        return x * (1 + scale(first).to(x.dtype)[:, None, None])


class NumberRead(Net):
    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        return x * (1.0 + (first.detach().abs().sum() > 0).item()) if number == 2 else x


class ShapeRead(Net):
    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number != 2:
            return x
        shares = [float((one > 0).nonzero().shape[0]) for one in first]
        return x * (1 + torch.tensor(shares, dtype=x.dtype)[:, None, None] / 20)


class Positions(nn.Module):
    """Computes whole numbers, and with parameters under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return torch.arange(x.shape[1]).expand(x.shape[:2]), self.table * 2 + x.mean((1, 2), keepdim=True)


class NoGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def beside(self, x: Tensor) -> Any:
        return self.positions(x)

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        return x + beside[1] + beside[0][..., None] if number > 1 else x


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> None:
        x += self.bias


class WritesAside(Net):
    """A module outside the layers that returns nothing, and writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.adds = Adds()

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number == 0:
            self.adds(first)
        return x + first if number == 3 else x


RIGHT: tuple[type[Net], ...] = (
    *(WrittenBetween, DataWrite, ViewWrite, KeptBefore, DataRead, Mapped, NumberRead, ShapeRead, NoGradient),
    WritesAside,
)
