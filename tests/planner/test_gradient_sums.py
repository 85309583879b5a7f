"""Gradients meet in the same memory while bytes are counted as when nobody counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shardwright.planner.fakes import Fakes
from shardwright.planner.live_bytes import LiveBytes
from shardwright.planner.operators import Operators
from shardwright.utils.pytree import TorchDispatchMode

SUMS = {torch.ops.aten.add.Tensor: "add", torch.ops.aten.add_.Tensor: "add_"}


class Sums(TorchDispatchMode):
    """By which operators sums were made, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SUMS:
            self.names.append(SUMS[func])
        return func(*args, **(kwargs or {}))


class Twice(torch.autograd.Function):
    """Its gradient is one tensor for both inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        both = dy + dy.sum()  # by itself, whatever the engine does
        return both, both


def residual(x: Tensor) -> Tensor:
    y = x * 1
    return y + F.layer_norm(y, (4,)) + y.exp() * y.sin()


def expanded(x: Tensor) -> Tensor:
    """Gradients that are wider than their memory, that lie the other way round, or that others hold."""
    y = x * 1
    return y.sum() + (y.expand(3, 4, 4) * 2).sum(0) + y.t().contiguous() * 3 + y.view(16).cumsum(0).view(4, 4)


def shared(x: Tensor) -> Tensor:
    y, z = x * 1, x.cos()
    return Twice.apply(y, y) * Twice.apply(z, y)  # type: ignore[no-any-return]


def looked_up(table: Tensor) -> Tensor:
    """A weight of three uses, as a tied one of an encoder and a decoder."""
    ids = torch.tensor([0, 2, 3, 3])
    return F.embedding(ids, table) @ table.t() + F.embedding(ids.flip(0), table)


@contextmanager
def watched(*modes: Any) -> Iterator[Sums]:
    sums = Sums()
    with ExitStack() as stack:
        for mode in (*modes[:1], sums, *modes[1:]):
            stack.enter_context(mode)
        sums.names.clear()  # of what modes do first
        yield sums


def backward_of(function: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    loss = function(torch.rand(4, 4, requires_grad=True)).sum()
    return loss.backward


@pytest.mark.parametrize("function", [residual, expanded, shared, looked_up])
def test_sums_are_those_of_an_unwatched_backward(function: Callable[[Tensor], Tensor]) -> None:
    backward = backward_of(function)
    with profile(activities=[ProfilerActivity.CPU]) as events:
        backward()
    in_order = sorted(events.events() or [], key=lambda event: event.time_range.start)
    real = [event.name.removeprefix("aten::") for event in in_order if event.name in ("aten::add", "aten::add_")]
    assert "add_" in real

    backward = backward_of(function)
    with watched(torch.enable_grad(), LiveBytes()) as sums:
        backward()
    assert sums.names == real

    with watched(Fakes(), LiveBytes()) as sums:
        backward = backward_of(function)
        sums.names.clear()
        backward()
    assert sums.names == real

    with watched(Fakes(), LiveBytes(), Operators()) as sums:
        backward = backward_of(function)
        sums.names.clear()
        backward()
    assert sums.names == real


def test_a_sum_takes_no_new_memory() -> None:
    """Of four gradients of a table there are two at a time."""
    size = 2**20
    table = torch.rand(size, requires_grad=True)
    with LiveBytes() as live:
        loss = sum((table * factor).sum() for factor in (1.0, 2.0, 3.0, 4.0))
        before = live.bytes()
        live.most = 0
        loss.backward()  # type: ignore[union-attr]
        assert live.most - before < 2.1 * table.nbytes


def test_other_gradients_are_what_they_were() -> None:
    for function in (residual, expanded, shared, looked_up):
        torch.manual_seed(0)
        table = torch.rand(4, 4, requires_grad=True)
        function(table).sum().backward()
        expected = table.grad
        table.grad = None
        with LiveBytes():
            function(table).sum().backward()
        assert torch.equal(table.grad, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["hook", "function"])
def test_gradients_that_somebody_keeps_stay_as_they_were(kind: str) -> None:
    """Those that only Python holds, too."""
    kept: list[Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            kept.append(2 * grads[0])
            return kept[-1]

    def backward() -> list[Tensor]:
        kept.clear()
        x = torch.arange(12.0).view(3, 4).requires_grad_()
        shared = x.sin()
        other = shared.cos()  # made first: its gradient comes last
        used = shared + 1 if kind == "hook" else Keeps.apply(shared)
        if kind == "hook":
            used.register_hook(kept.append)
        (used.square() + other).sum().backward()
        assert x.grad is not None
        return [x.grad, *(grad.clone() for grad in kept)]

    expected = backward()
    with LiveBytes():
        found = backward()
    assert len(found) == len(expected) == 2
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_bytes_are_counted_where_nothing_is_differentiated() -> None:
    with torch.inference_mode(), LiveBytes() as live:
        table = torch.rand(64)
        assert live.bytes() == table.nbytes
