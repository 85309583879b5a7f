"""Models whose names say nothing: linears that feed each other are found by autograd, tried on a small copy, and dealt;
what was found wrong or not at all stays whole, by name.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright import Booster
from shardwright.plugins import HybridParallelPlugin
from shardwright.shardformer.feeding import find_feedings
from shardwright.spec import get_spec
from shardwright.testing import adamw, compare_models, run_ranks

WIDTH = 24


class Mix(nn.Module):
    """Attention with four heads of queries on two of keys and values, which its forward counts."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.n, self.size = 4, 2, 6
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * 12)
        self.c = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.a(x).view(*x.shape[:2], self.m, self.size).transpose(1, 2)
        k, v = (
            part.reshape(*x.shape[:2], self.n, self.size).transpose(1, 2).repeat_interleave(2, 1)
            for part in self.b(x).chunk(2, -1)
        )
        return self.c(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.mix = Mix()
        self.d, self.e = nn.Linear(WIDTH, 2 * 40), nn.Linear(40, WIDTH)
        self.f, self.g = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.n1(x))
        gate, up = self.d(self.n2(x)).unflatten(-1, (-1, 2)).unbind(-1)  # side by side, feature by feature
        x = x + self.e(F.silu(gate) * up)
        return x + self.g(F.layer_norm(self.f(self.n3(x)), (32,)))  # every feature depends on every feature


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.stack = nn.Embedding(53, WIDTH), nn.ModuleList(Block() for _ in range(6))
        self.last, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 53)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.stack:
            x = block(x)
        return self.out(self.last(x))


class Alone(nn.Module):
    """Nothing in it can be dealt: its two linears have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).softmax(-1))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(53, (4, 9), generator=torch.Generator().manual_seed(seed))}


def criterion(outputs: torch.Tensor, inputs: Any) -> torch.Tensor:
    return F.cross_entropy(outputs[:, :-1].flatten(0, 1), inputs["ids"][:, 1:].flatten())


def trained(rank: int, world: int, layout: dict[str, Any]) -> dict[str, Any]:
    plugin = HybridParallelPlugin(
        **layout, custom_policy="auto", example_inputs=batch(5), precision="fp32", max_norm=0.05
    )
    plain, model = made(Net), made(Net)
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, adamw(model.parameters()))
    step: Any = adamw(plain.parameters())
    if plugin.mesh.size("pp") > 1:
        loss = Booster.execute_pipeline(
            Booster(plugin=plugin), iter([batch(1)]), boosted, criterion, optimizer, return_loss=True
        )["loss"]
    else:
        loss = criterion(boosted(**batch(1)), batch(1))
        optimizer.backward(loss)
    expected = criterion(plain(**batch(1)), batch(1))
    expected.backward()
    compare_models(
        plain,
        boosted,
        coordinate=plugin.mesh.coordinate,
        losses=None if loss is None else (expected.detach().reshape(1), loss.detach().reshape(1)),
        gradients=optimizer.gradients(),
        weights=False,
    )
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
    optimizer.step()
    step.step()
    compare_models(plain, boosted, coordinate=plugin.mesh.coordinate, gradients=False)
    dealt = {name for name, param in boosted.unwrap().named_parameters() if (get_spec(param) or param).is_sharded}
    return {"dealt": dealt, "report": str(plugin.layout)}


def test_a_model_of_unknown_names_is_dealt_as_one_process_trains_it() -> None:
    for found in run_ranks(trained, 2, {"tp_size": 2}):
        weights = {re.sub(r"stack\.\d", "stack.*", name) for name in found["dealt"] if name.endswith("weight")}
        inside = {f"stack.*.{name}.weight" for name in ("mix.a", "mix.b", "mix.c", "d", "e")}
        assert weights == {*inside, "words.weight", "out.weight"}
        assert re.search(r"stay whole.*stack\.\*\.f: all its features are mixed before stack\.\d\.g", found["report"])


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [{"pp_size": 2}, {"tp_size": 2, "pp_size": 2}], ids=str)
def test_it_is_cut_into_stages_too(layout: dict[str, Any]) -> None:
    world = 2 * layout.get("tp_size", 1)
    run_ranks(trained, world, {**layout, "num_microbatches": 2})


def refused(rank: int, world: int) -> list[str]:
    found = []
    for model, example in ((made(Alone), {"x": torch.randn(3, 8)}), (made(Net), None), (made(Net), {"x": 1})):
        plugin = HybridParallelPlugin(tp_size=2, custom_policy="auto", example_inputs=example, precision="fp32")
        with pytest.raises(ValueError) as caught:
            Booster(plugin=plugin).boost(model, adamw(model.parameters()))
        found.append(str(caught.value))
    return found


def test_what_cannot_be_dealt_or_tried_is_refused_by_name_on_every_rank() -> None:
    for alone, no_batch, other_batch in run_ranks(refused, 2):
        assert "Alone with custom_policy='auto' could not be sharded" in alone
        assert "a: its weight is that of another module too" in alone
        assert "pass example_inputs=, a batch like the real ones" in no_batch
        assert "example_inputs: a small copy of Net does not run on it" in other_batch


class Chain(nn.Module):
    """a feeds b, b feeds c, feature by feature; d is read by e and by the output; f by g and h, of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 12), nn.Linear(12, 6)
        self.d, self.e = nn.Linear(6, 8), nn.Linear(8, 6)
        self.f, self.g, self.h = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 6)
        self.h.weight = self.g.weight

    def forward(self, x: torch.Tensor) -> Any:
        x = x + self.c(self.b(self.a(x).tanh()).tanh())
        kept = self.d(x.softmax(-1)).tanh()
        other = self.f(x.softmax(-1)).tanh()
        return {"x": x + self.e(kept) + self.g(other) + self.h(other), "kept": kept}


def test_what_feeds_what() -> None:
    net = made(Chain)
    before = copy.deepcopy(net.state_dict())
    found = find_feedings(net, {"x": torch.randn(3, 5, 6, dtype=torch.float64)}, lambda name: False)
    feedings = [(feeding.blocks, dict(feeding.columns), feeding.rows) for feeding in found.feedings]
    assert feedings == [(10, {"a": 1}, ("b",))]  # of the two pairs in the chain the larger one
    assert "d" in found.outputs
    assert found.reasons["g"] == "its weight is that of another module too"
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Rare(nn.Module):
    """Two features of many change places, where no sample of features looks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x).tanh()
        order = [61 if place == 2 else 2 if place == 61 else place for place in range(64)]
        return self.b(y[..., order])


def rare(rank: int, world: int) -> str:
    model = made(Rare)
    plugin = HybridParallelPlugin(tp_size=2, custom_policy="auto", example_inputs=torch.randn(3, 8), precision="fp32")
    boosted, _, *_ = Booster(plugin=plugin).boost(model, adamw(model.parameters()))
    assert boosted.unwrap().a.weight.shape == (64, 8)
    return str(plugin.layout)


def test_a_pair_that_fails_the_check_stays_whole_and_is_named() -> None:
    for report in run_ranks(rare, 2):
        assert "a: (a -> b) did not give the gradients of the whole model" in report
