"""Nets that people write by hand, wired in ways that no names tell of."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUTS, WIDTH, WORDS, LENGTH = 12, 24, 41, 9


class Tokens(nn.Module):
    """Mixes positions, then features, by linears alone."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.t1, self.t2 = nn.Linear(LENGTH, 20), nn.Linear(20, LENGTH)
            self.c1, self.c2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.t2(F.gelu(self.t1(self.n1(x).transpose(1, 2)))).transpose(1, 2)
            return x + self.c2(F.gelu(self.c1(self.n2(x))))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 7)
        self.layers = nn.ModuleList(self.Layer() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


class InARow(nn.Module):
    """Linears that have numbers for names, in a row and in rows of two."""

    def __init__(self) -> None:
        super().__init__()
        widths = [INPUTS, 64, 48, 64, 32]
        self.row = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
        self.pairs = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)))
        self.bare = nn.ModuleList(nn.Linear(32, 32) for _ in range(7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.row(x) + self.pairs(x)
        for linear in self.bare:
            x = linear(x).relu()
        return x


class ByHead(nn.Module):
    """Fused queries, keys and values, head by head, counted by an attribute; layers that go by names of their own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many, self.all, self.back = 4, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.all(x).view(*x.shape[:2], self.many, 3, -1).unbind(3)
            weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
            return x + self.back(torch.einsum("bhts,bshd->bthd", weights, v).flatten(2))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 5)
        self.early, self.middle, self.late = (self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.late(self.middle(self.early(self.first(x)))))


class Experts(nn.Module):
    """A mixture in a list, of which a token sees one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router, self.last = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 5)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 40), nn.SiLU(), nn.Linear(40, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weights = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = weights.argmax(-1) == number
            out[mine] = expert(x[mine]) * weights[mine][:, number : number + 1]
        return self.last(x + out)


class Clipped(nn.Module):
    """In training it reads a weight by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(INPUTS, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 30)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.up(self.norm(x))
        if self.training:
            return self.last(x + F.linear(y.tanh(), self.down.weight.clamp(-0.05, 0.05), self.down.bias))
        return self.last(x + self.down(y.tanh()))


class Recurrent(nn.Module):
    """What nobody here can deal: cells, products of two, raw parameters, and a pair with features known by number,
    which is called for several shapes, and returns a tuple.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.both, self.up, self.down = nn.Bilinear(WIDTH, WIDTH, WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.raw, self.last = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2), nn.Linear(WIDTH, WORDS)

    def pair(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.up(x)
        y.mul_(0.5)
        y[..., :3] += 1.0
        return self.down(y.tanh()), x.mean(-1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        words = self.words(x)
        x, _ = self.cell(words)
        x = F.linear(self.both(x, words), self.raw)
        each, means = self.pair(x)
        together, _ = self.pair(x.mean(1))
        return self.last(x + each + together[:, None]), means


def batch(net: type[nn.Module], seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    if net is Recurrent:
        return {"x": torch.randint(WORDS, (4, LENGTH), generator=generator)}
    return {"x": torch.randn(4, LENGTH, INPUTS, generator=generator, dtype=torch.float64)}
