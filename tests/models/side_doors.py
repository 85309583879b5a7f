"""Toy models whose layers hand something on past what they return, or that write to what they have returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


class BufferReplaced(BufferInPlace):
    """The same with another tensor in place of the old one."""

    block = Block

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return x


class TensorKept(BufferReplaced):
    """The same of a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.mean
        self.mean = torch.ones(1, dtype=torch.float64)


class FrozenWritten(Net):
    """A parameter without gradients, which the forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.ones(1), requires_grad=False)

    def beside(self, x: Tensor) -> Any:
        x.add_(self.mean)

    def behind(self, x: Tensor, first: Tensor, beside: Any) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        return x


class SharedStatistics(Net):
    """Layers of several stages would each gather running statistics of their own."""

    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            return super().forward(beside(x.transpose(1, 2)).transpose(1, 2))

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)

    def beside(self, x: Tensor) -> Any:
        return self.statistics


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


@dataclass
class State:
    x: Tensor


class Objects(Net):
    class block(Block):
        def forward(self, x: Any, beside: Any = None) -> Any:
            return State(super().forward(x.x))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        state = State(self.words(input_ids))
        for layer in self.layers:
            state = layer(state)
        logits = self.head(state.x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


# Net -> what its refusal says.
REFUSED: dict[type[Net], str] = {
    History: r"layers\.0 changes the list that it gets as its argument number 2, and layers\.2 reads it",
    Cached: r"layers\.1 changes the dict that it gets as its argument number 2, and layers\.3 reads it",
    Counted: r"layers\.0 changes the dict that it gets as its argument number 2, and layers\.2 reads it",
    Popped: r"layers\.0 changes the list that it gets as its argument number 2, and layers\.2 reads it",
    OtherInPlace: r"layers\.0 writes in place to a tensor that it has not made, and what lies behind the layers reads",
    BufferInPlace: r"layers\.2 writes to mean, which layers\.0 reads",
    BufferReplaced: r"what lies behind the layers writes to mean, which layers\.0 reads",
    TensorKept: r"what lies behind the layers writes to mean, which layers\.0 reads",
    FrozenWritten: r"what lies behind the layers writes to mean, which layers\.0 reads",
    SharedStatistics: r"layers\.\d writes to statistics\.running_mean, which layers\.\d reads",
    Objects: r"layers\.0 returns a State with tensors in it, and between pipeline stages travel tensors, alone",
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


class ListRead(Net):
    """What `torch.tensor` reads of a list of tensors no operator tells of."""

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        if number != 2:
            return x
        means = torch.tensor([one.detach().mean() for one in first])
        return x * (1 + (means > 0).to(x)[:, None, None])


def look(module: nn.Module, args: Any, output: Any = None) -> None:
    (args[0] if output is None else output).detach().abs().max().item()


class HooksRead(Net):
    """Hooks of a script tell what layers, and modules outside of them, get and return."""

    def __init__(self) -> None:
        super().__init__()
        for module in (*self.layers, self.words, self.head):
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look)


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


class Numbers(Net):
    """Layers return numbers, which the model adds up."""

    class block(Block):
        def forward(self, x: Tensor, beside: Any = None) -> Any:
            return super().forward(x), 0.5 + self.number

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, total = self.words(input_ids), 0.0
        for layer in self.layers:
            x, number = layer(x)
            total += number
        logits = self.head(x * (1 + total))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Hooked(Net):
    """Gradients of what layers return, changed by the model."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class NothingToTrain(Net):
    """Stages between the first one and the last have no parameters."""

    class block(Block):
        def __init__(self, number: int) -> None:
            nn.Module.__init__(self)
            self.number = number

        def forward(self, x: Tensor, beside: Any = None) -> Tensor:
            return x * 1.01 + torch.tanh(x) * self.number


class Detached(Net):
    """Layers in front get no gradient, so that an optimizer leaves them alone."""

    def between(self, x: Tensor, number: int, first: Tensor, beside: Any) -> Tensor:
        return x.detach() if number == 1 else x


RIGHT: tuple[type[Net], ...] = (
    *(WrittenBetween, DataWrite, ViewWrite, KeptBefore, DataRead, Mapped, NumberRead, ShapeRead, NoGradient),
    *(WritesAside, ListRead, HooksRead, Numbers, Detached, Hooked),
)


class SometimesRead(Net):
    """What the first block returns beside the hidden states is read only where the batch has a `scale`."""

    class block(Block):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.aside = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, beside: Any = None) -> Any:
            return super().forward(x), self.aside(x)

    def forward(self, input_ids: Tensor, labels: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        x, first = self.layers[0](self.words(input_ids))
        for layer in self.layers[1:]:
            x, _ = layer(x)
        if scale is not None:
            x = x + first * scale[:, None, None]
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
