"""ZeRO stage 3 against one process: tables of embeddings that are more than looked up, also away from their module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright import Booster
from shardwright.plugins import LowLevelZeroPlugin
from shardwright.testing import keep_float64, run_ranks

WORDS, WIDTH = 40, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """A head with the weights of the table, which stay gathered between the two."""

    table: type[nn.Embedding] = nn.Embedding

    def __init__(self) -> None:
        super().__init__()
        self.embedding = self.table(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.1)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(ids)))


class ReadBehindTheTable(Tied):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = x + torch.tanh(x @ self.embedding.weight.T) @ self.embedding.weight
        return self.head(self.body(x))


class ReadBeforeTheHead(Tied):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(ids)) * self.embedding.weight.norm())


class ReadBehindTheHead(Tied):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.embedding(ids)))
        return logits + torch.tanh(logits @ self.embedding.weight) @ self.embedding.weight.T


class LookedUpTwice(Tied):
    """No head, but two calls of the table, between which it is read."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) * self.embedding.weight.norm()
        return self.body(x + self.embedding((ids + 1) % WORDS))


class Multiplied(Tied):
    """Words by their numbers, pictures by how much they are of each."""

    class table(nn.Embedding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight if x.is_floating_point() else super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.pictures = self.table(WORDS, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        return self.head(self.body(x + self.pictures(self.head(x).softmax(-1))))


class ScaledInTraining(Tied):
    class table(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            rows = super().forward(ids)
            return rows * self.weight.norm() if self.training else rows


KINDS = (ReadBehindTheTable, ReadBeforeTheHead, ReadBehindTheHead, LookedUpTwice, Multiplied, ScaledInTraining)


def words(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 5 + rank), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of two forwards, in one backward."""
    first, second = model(words(step, rank)), model(words(step + 5, rank))
    loss: torch.Tensor = F.log_softmax(first, -1).square().mean().log() * second.tanh().square().mean()
    return loss


def train(rank: int, world: int, kind: type[Tied], ahead: int | None) -> None:
    with keep_float64():
        torch.manual_seed(0)
        plain = kind().double()
        torch.manual_seed(0)
        model = kind().double().eval()
        plain_optim = torch.optim.SGD(plain.parameters(), 0.01, momentum=0.9)
        booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32", gather_ahead=ahead))
        model, optim, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
        assert not any(module.training for module in model.unwrap().modules()), "boost has left another mode"
        model.train()
        for step in range(3):
            loss = loss_of(model, step, rank)
            kept = model.unwrap().embedding.weight.detach()
            before = plain.embedding.weight.detach().clone()
            booster.backward(loss, optim)
            for other in range(world):
                expected = loss_of(plain, step, other)
                (expected / world).backward()
                if other == rank:
                    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=0)
            for each in (plain_optim, optim):
                each.step()
                each.zero_grad()
            torch.testing.assert_close(kept, before, rtol=1e-10, atol=1e-10)
        for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.detach(), wanted.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.__name__ for kind in KINDS])
def test_tables_are_there_for_what_reads_them(kind: type[Tied]) -> None:
    for ahead in (None, 0):
        run_ranks(train, 2, kind, ahead, timeout=60)
