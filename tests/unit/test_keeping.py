"""Regions that recompute what is cheap: against the same module without a checkpoint, bit by bit, and with its
operators counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardwright.ops.keeping import Region, Selection, is_dear
from shardwright.ops.postponed import PostponeWeightGrads
from shardwright.ops.weight_grad import WeightGradStore
from shardwright.pipeline.checkpointing import run_checkpointed, run_selectively
from shardwright.pipeline.saved_bytes import measure

HIDDEN, HEADS = 16, 2


class Block(nn.Module):
    """Attention and a gated MLP with norms and dropout, and edits in place of what products return."""

    def __init__(self, dropout: float = 0.0, eager: bool = False, edits: bool = True) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=name != "v") for name in "qkvo")
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 40), nn.Linear(HIDDEN, 40), nn.Linear(40, HIDDEN)
        self.dropout, self.eager, self.edits = dropout, eager, edits
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        y = self.norms[0](x)
        q, k, v = (linear(y).view(*y.shape[:-1], HEADS, -1).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = q.sin(), k.cos()  # a rotation
        if self.eager:
            attended = F.dropout((q @ k.transpose(2, 3) / 3).softmax(-1), self.dropout) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = self.o(attended.transpose(1, 2).reshape(x.shape))
        if self.edits:
            out += F.dropout(y, self.dropout)  # writes to what the product returned, which nothing else holds
        x = x + out
        y = self.norms[1](x)
        return x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), self.dropout)


class Count(TorchDispatchMode):
    """Operators that run inside, by name, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func).rpartition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def dear(self) -> Counter[str]:
        return Counter({name: number for name, number in self.calls.items() if is_dear(name)})


Run = Callable[..., Any]


def selectively(function: Callable[..., Any], *args: Any) -> Any:
    return run_selectively(Selection(), function, *args)


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def trained(run: Run, module: nn.Module, length: int = 6, layers: int = 2) -> tuple[list[torch.Tensor], Counter[str]]:
    """Gradients of the input and of every parameter, and the dear operators of a step."""
    torch.manual_seed(5)
    x = torch.randn(3, length, HIDDEN, dtype=torch.float64, requires_grad=True)
    module.zero_grad()
    with Count() as count:
        y = x
        for _ in range(layers):
            y = run(module, y)
        (y * y.sin()).sum().backward()
    return [x.grad, *(param.grad for param in module.parameters())], count.dear


@pytest.mark.parametrize(("dropout", "eager"), [(0.0, False), (0.3, False), (0.3, True)])
def test_gradients_are_bitwise_equal_and_no_product_runs_twice(dropout: float, eager: bool) -> None:
    module = Block(dropout, eager).double()
    (expected, plain), (found, counted), (_, again) = (
        trained(run, module) for run in (plainly, selectively, run_checkpointed)
    )
    assert all(map(torch.equal, expected, found))
    assert counted == plain
    assert sum(again.values()) > sum(plain.values()), "whole layers repeat their products"
    assert module.runs == 2 + 4 + 4


def test_scores_over_long_sequences_are_recomputed() -> None:
    module = Block(0.2, eager=True).double()
    length = 16 * HIDDEN // HEADS + 8
    (expected, plain), (found, counted) = (trained(run, module, length, layers=1) for run in (plainly, selectively))
    assert all(map(torch.equal, expected, found))
    assert counted - plain == Counter({"aten.bmm": 1}), "queries with keys"
    assert not plain - counted


def test_a_product_with_a_short_contraction_is_recomputed() -> None:
    """The second one of LoRA, whose output is as large as that of the linear that it corrects."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 1, bias=False), nn.Linear(1, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.base(x) + self.b(self.a(x))).exp()

    module, x = Adapted(), torch.randn(64, 64)
    with measure(module.parameters()) as saved:
        selectively(module, x.requires_grad_())
    assert saved.bytes == 4 * 64 * (64 + 64 + 1), (
        "the input, the linear's output and the first product of the correction"
    )


def test_only_what_is_read_again_is_kept() -> None:
    module = Block()
    x = torch.randn(3, 6, HIDDEN, requires_grad=True)
    amounts = []
    for run in (plainly, selectively, run_checkpointed):
        with measure(module.parameters()) as saved:
            run(module, x)
        amounts.append(saved.bytes)
    token = 3 * 6 * 4
    assert amounts[2] == token * HIDDEN
    # The input, q, k, v and o, attention and its sums, gate and up; down's output is not read, the sum with it is
    # nobody's input.
    assert amounts[1] == token * (6 * HIDDEN + HEADS + 2 * 40)
    assert amounts[1] < 0.6 * amounts[0]


def test_what_the_user_names_is_kept() -> None:
    module, names = Block(0.4).double(), ["aten.silu", "aten._scaled_dot_product_flash_attention_for_cpu"]
    counts = []
    for run in (plainly, lambda *args: run_selectively(Selection(names), *args)):
        torch.manual_seed(5)
        x = torch.randn(3, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
        with Count() as count:
            run(module, x).sum().backward()
        counts.append(count.calls)
    assert all(counts[0][name] == counts[1][name] > 0 for name in names)
    assert counts[1]["aten.addmm"] > counts[0]["aten.addmm"]


class Odd(nn.Module):
    """Layers that do what operators do not show."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.does, self.probed = does, torch.zeros(())
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x.tanh())
        if self.does == "a gradient":
            (slope,) = torch.autograd.grad((y.tanh() * self.b(x)).sum(), y, create_graph=True)
            return x + self.norm(self.b(slope * y))
        if self.does == "inference":
            with torch.inference_mode():
                shift = self.a(x.detach())
            return x + self.norm(self.b(y) + shift.clone())
        if self.does == "a kernel of its own":
            return x + self.norm(self.b(x.tanh()) * float(y.detach().numpy().sum()))
        self.probed = y.detach()
        return x + self.norm(self.b(x.tanh()))


@pytest.mark.parametrize("does", ["a gradient", "inference", "a kernel of its own", "a probe"])
def test_what_is_hidden_from_operators_is_as_in_a_plain_layer(does: str) -> None:
    found = []
    for run in (plainly, run_checkpointed, selectively):
        torch.manual_seed(3)
        module = Odd(does).double()
        x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
        (run(module, x) ** 2).sum().backward()
        grads = [param.grad for param in module.parameters() if param.grad is not None]
        found.append([x.grad, module.probed, *grads])
    for other in found[1:]:
        assert len(other) == len(found[0])
        for ours, plain in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_random_numbers_stay_in_step_behind_what_does_not_draw_again() -> None:
    linear = nn.Linear(8, 8)

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = linear(x * torch.bernoulli(torch.full_like(x, 0.5)))
        return F.dropout(y.exp(), 0.5).sin()

    chosen, found = Selection(lambda name: is_dear(name) or name == "aten.bernoulli"), []
    for run in (plainly, lambda *args: run_selectively(chosen, *args)):
        torch.manual_seed(2)
        x = torch.ones(4, 8, requires_grad=True)
        run(forward, x).sum().backward()
        found.append((x.grad, torch.rand(3)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_second_backward_recomputes_everything() -> None:
    module = Block(0.3).double()
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = selectively(module, x).square().sum()
    first = torch.autograd.grad(y, [x, *module.parameters()], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, [x, *module.parameters()])))


def test_a_checkpoint_inside_of_the_layer_recomputes_what_it_holds() -> None:
    module = Block(0.3, edits=False).double()

    def nested(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x.sin(), use_reentrant=False).cos()

    (expected, _), (found, _) = (
        trained(run, module) for run in (lambda _, x: nested(x), lambda _, x: selectively(nested, x))
    )
    assert all(map(torch.equal, expected, found))


def test_what_waits_for_its_weight_gradient() -> None:
    """With a store the linears are other functions; the recomputation happens once, in the backward of the inputs."""
    store = WeightGradStore()
    module = Block(0.2, edits=False).double()
    expected, plain = trained(plainly, module, layers=1)
    torch.manual_seed(5)
    x = torch.randn(3, 6, HIDDEN, dtype=torch.float64, requires_grad=True)
    module.zero_grad()
    module.runs = 0

    def forward(x: torch.Tensor) -> torch.Tensor:
        with PostponeWeightGrads():
            return module(x)

    with Count() as count:
        y = selectively(forward, x)
        loss = (y * y.sin()).sum()
        with store.deferring():
            loss.backward()
        assert len(store) >= 7
        store.run()
    assert module.runs == 2
    for one, other in zip(expected, [x.grad, *(param.grad for param in module.parameters())], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert sum(count.dear.values()) == sum(plain.values())


@pytest.mark.parametrize(("shape", "bias"), [((4, 8), True), ((2, 3, 8), True), ((2, 3, 8), False)])
def test_edits_behind_the_layer_are_refused(shape: tuple[int, ...], bias: bool) -> None:
    linear, last = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8)
    x = torch.randn(shape, requires_grad=True)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = linear(x)
        return y, last(y.sin())

    y, z = selectively(forward, x)
    y.mul_(2.0)
    with pytest.raises(
        ValueError, match=r"an output of aten.(add)?mm that a selectively recomputed layer keeps was edited in place"
    ):
        (y.sum() + z.sum()).backward()


def test_a_layer_that_computes_something_else_the_second_time_is_refused() -> None:
    linear, calls = nn.Linear(8, 8), []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return linear(x).sin() if len(calls) == 1 else torch.bmm(x[None], linear.weight[None])[0].sin()

    y = selectively(forward, torch.randn(4, 8, requires_grad=True))
    with pytest.raises(ValueError, match=r"called aten.bmm where its forward had called aten.addmm"):
        y.sum().backward()


def test_a_region_lets_go_of_what_it_kept_as_it_is_recomputed() -> None:
    region, module = Region(Selection()), Block()
    y = checkpoint(
        module, torch.randn(2, 5, HIDDEN, requires_grad=True), use_reentrant=False, context_fn=region.contexts
    )
    kept = list(map(weakref.ref, region.tensors()))
    assert len(kept) == 8, "q, k, v, o, attention and its sums, gate and up"
    y.sum().backward()
    assert not any(tensor() is not None for tensor in kept)


@pytest.mark.parametrize(
    ("name", "dear"),
    [
        ("aten.mm", True),
        ("aten._scaled_dot_product_cudnn_attention", True),
        ("aten._scaled_dot_product_flash_attention_for_cpu", True),
        ("aten._scaled_dot_product_efficient_attention_backward", False),
        ("flash_attn._flash_attn_varlen_forward", True),
        ("flash_attn_3.bwd", False),
        ("aten._grouped_mm", True),
        ("aten.convolution", True),
        ("aten.silu", False),
        ("aten._softmax", False),
    ],
)
def test_operators_are_known_by_name(name: str, dear: bool) -> None:
    assert is_dear(name) == dear
