"""ZeRO stage 3 against one process: modules whose inputs and outputs are more than one tensor, or none."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwright import Booster
from shardwright.plugins import LowLevelZeroPlugin
from shardwright.testing import run_ranks

SAMPLES = 2  # per rank
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.mix(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layers = nn.ModuleList(self.block() for _ in range(3))

    block: type[nn.Module] = Block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden * self.scale


class Appending(Stack):
    class block(Block):
        def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
            found.append(self.mix(x))
            return found[-1].sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, found = self.inputs(x), list[torch.Tensor]()
        for layer in self.layers:
            hidden = layer(hidden, found)
        assert len(found) == 3
        return hidden * self.scale + sum(found)


class ByState(Stack):
    class block(Block):
        def forward(self, *, state: dict[str, torch.Tensor]) -> None:  # type: ignore[override]
            state["hidden"] = self.mix(state["hidden"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"hidden": self.inputs(x)}
        for layer in self.layers:
            layer(state=state)
        return state["hidden"] * self.scale


@dataclass
class Found:
    hidden: torch.Tensor


class InDataclasses(Stack):
    class block(Block):
        def forward(self, x: Any) -> Found:
            return Found(self.mix(x.hidden if isinstance(x, Found) else x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.inputs(x)
        for layer in self.layers:
            found = layer(found)
        return found.hidden * self.scale


class Mailbox:
    hidden: torch.Tensor


class InObjects(Stack):
    class block(Block):
        def forward(self, box: Any) -> None:
            box.hidden = self.mix(box.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        box = Mailbox()
        box.hidden = self.inputs(x)
        for layer in self.layers:
            layer(box)
        return box.hidden * self.scale


class ViewsChanged(Stack):
    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.tanh(self.up(x))).transpose(0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inputs(x)
        for layer in self.layers:
            hidden = layer(hidden)
            hidden += 0.5
            hidden = hidden.sin()
        return hidden * self.scale


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[: x.shape[1]]


class WeightsAsOutputs(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.positions(x)
        return super().forward(x) + positions


class CallingItself(Stack):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        found = super().forward(x)
        return self(found.mean() + x * self.scale, depth - 1) + self.scale.square().sum() if depth else found


class AsAttributes(Stack):
    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.mix(x)
            self.router_loss = self.up(hidden).square().mean() + self.down.weight.square().sum()
            return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + sum(layer.router_loss for layer in self.layers)


class AttributesAlone(AsAttributes):
    class block(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.router_loss = self.mix(x).square().mean()
            return x


class ObjectsAlone(Stack):
    """What it appends to is neither a list nor anything that the layer knows: a closure."""

    class block(Block):
        def forward(self, x: torch.Tensor, note: Any) -> torch.Tensor:  # type: ignore[override]
            note(self.mix(x).square().mean())
            return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, found = self.inputs(x), list[torch.Tensor]()
        for layer in self.layers:
            hidden = layer(hidden, lambda loss: found.append(loss))
        return hidden * self.scale + sum(found)


class AttributesOfOne(AsAttributes):
    """Backward begins in the middle, at what the second layer does not return: the third one asks nothing of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        hidden = second(first(self.inputs(x)))
        return third(hidden.detach()) * self.scale + second.router_loss


class ObjectsOfOne(Stack):
    class block(Block):
        def forward(self, x: torch.Tensor, box: Mailbox) -> torch.Tensor:  # type: ignore[override]
            hidden = self.mix(x)
            box.hidden = self.up(hidden)
            return hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        boxes = Mailbox(), Mailbox(), Mailbox()
        hidden = second(first(self.inputs(x), boxes[0]), boxes[1])
        return third(hidden.detach(), boxes[2]) * self.scale + boxes[1].hidden


def features(step: int, samples: int) -> torch.Tensor:
    return torch.randn(samples, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def own_models(rank: int, world: int) -> None:
    """Modules with habits of their own; steps with a forward that nothing is learned from, and one that fails."""
    kinds = (Appending, ByState, InDataclasses, InObjects, ViewsChanged, WeightsAsOutputs, CallingItself, AsAttributes)
    kinds += (AttributesAlone, ObjectsAlone, AttributesOfOne, ObjectsOfOne)
    for kind in kinds:
        for ahead in (None, 0):
            torch.manual_seed(0)
            plain = kind().double()
            torch.manual_seed(0)
            model = kind().double()
            plain_optim = torch.optim.AdamW(plain.parameters(), lr=1e-2)
            booster = Booster(plugin=LowLevelZeroPlugin(stage=3, precision="fp32", gather_ahead=ahead))
            model, optim, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            for step in range(3):
                shares = features(step, SAMPLES * world).split(SAMPLES)
                for share in shares:
                    (plain(share).square().mean() / world).backward()
                with pytest.raises(RuntimeError):
                    model(shares[rank][..., :-1])
                model(shares[rank])
                loss = model(shares[rank]).square().mean()
                with torch.inference_mode():
                    torch.testing.assert_close(model(shares[rank]), plain(shares[rank]), rtol=1e-10, atol=1e-10)
                    for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                        assert step != 1 or torch.allclose(got, wanted, rtol=1e-10, atol=1e-10)
                if step == 1:
                    average, expected = copy.deepcopy(model.unwrap()), copy.deepcopy(plain)
                booster.backward(loss, optim)
                grads = optim.gradients()
                for key, param in plain.named_parameters():
                    note = partial(named, f"{kind.__name__}, ahead {ahead}: {key}.grad")
                    torch.testing.assert_close(grads[key], param.grad, rtol=1e-10, atol=1e-10, msg=note)
                for each in (plain_optim, optim):
                    each.step()
                    each.zero_grad()
                assert not any(bucket.filled for bucket in optim.units.buckets)
                assert not optim.units._uses
            for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
            share = features(9, SAMPLES)
            torch.testing.assert_close(average(share), expected(share), rtol=1e-10, atol=1e-10)


def named(name: str, text: str) -> str:
    return f"{name}: {text}"


@pytest.mark.timeout(240)
def test_modules_give_away_what_they_like() -> None:
    run_ranks(own_models, 2, timeout=110)
