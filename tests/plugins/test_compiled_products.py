"""Linears that gather or deal out as one operator of a graph: what is joined, what is kept and sent, and numbers."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx

from shardwright.comm.collectives import all_gather, even_sizes
from shardwright.ops import compiled, compiled_products, compiled_sequence, layer_graphs
from shardwright.testing import run_ranks

B, S, H, WIDE = 2, 7, 6, 4


def _block(x: torch.Tensor, *params: torch.Tensor, group: str, again: bool, in_parts: bool) -> torch.Tensor:
    """Two column linears, one of them with a bias and its weight transposed, and a row linear."""
    first, second, bias, row = params
    whole = compiled_sequence.gather_sequence(torch.tanh(x), group, 1, S, again, in_parts)
    one = compiled.column_linear(whole, first, None, group, False)
    other = compiled.column_linear(whole, second, bias, group, True)
    if in_parts:
        return compiled_products.scattered_linear(F.silu(one) * other, row, group, 1)
    return compiled_sequence.scatter_sequence(F.linear(F.silu(one) * other, row), group, 1)


def _of_one_process(x: torch.Tensor, params: list[list[torch.Tensor]]) -> torch.Tensor:
    whole = torch.tanh(x)
    return sum(
        F.linear(F.silu(F.linear(whole, first)) * F.linear(whole, second.t(), bias), row)
        for first, second, bias, row in params
    )  # type: ignore[return-value]


def _note(kept: list[torch.Tensor], saved: torch.Tensor) -> torch.Tensor:
    kept.append(saved)
    return saved


def _compare(rank: int, world: int, backend: str, ways: list[tuple[bool, bool]]) -> None:
    layer_graphs.backend = backend
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(B, S, H, dtype=torch.float64, generator=generator)
    shapes = (WIDE, H), (H, WIDE), (WIDE,), (H, WIDE)
    params = [[torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes] for _ in range(world)]
    weights = torch.randn(B, S, H, dtype=torch.float64, generator=generator)
    for each in (whole, *(param for one in params for param in one)):
        each.requires_grad_()
    (_of_one_process(whole, params) * weights).sum().backward()
    sizes, group = even_sizes(S, world), compiled.name_of(dist.group.WORLD)  # type: ignore[arg-type]
    for again, in_parts in ways:
        x = whole.detach().split(sizes, 1)[rank].clone().requires_grad_()
        mine = [param.detach().clone().requires_grad_() for param in params[rank]]
        block = torch.compile(_block, backend=layer_graphs.compile_graph, fullgraph=True, dynamic=True)
        kept: list[torch.Tensor] = []
        calls = {name: patch.object(dist, name, wraps=getattr(dist, name)) for name in ("broadcast", "reduce")}
        with (
            torch.autograd.graph.saved_tensors_hooks(partial(_note, kept), lambda saved: saved),
            calls["broadcast"] as broadcast,
            calls["reduce"] as reduce,
        ):
            y = block(x, *mine, group=group, again=again, in_parts=in_parts)
            (y * weights.split(sizes, 1)[rank]).sum().backward()
        gathered = [saved for saved in kept if saved.numel() == B * S * H]
        assert bool(gathered) != again, [saved.shape for saved in kept]
        # Forward, and where what was scattered is gathered in backward.
        assert (broadcast.call_count, reduce.call_count) == ((2 * world, world) if in_parts else (0, 0))
        expected: Any = [whole.grad.split(sizes, 1)[rank], *(param.grad for param in params[rank])]  # type: ignore[union-attr]
        for actual, wanted in zip((x.grad, *(param.grad for param in mine)), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
        found = all_gather(y.detach(), dist.group.WORLD, 1, sizes)  # type: ignore[arg-type]
        torch.testing.assert_close(found, _of_one_process(whole, params).detach(), rtol=1e-10, atol=1e-10)


def test_products_beside_what_is_sent_equal_one_process() -> None:
    run_ranks(_compare, 2, "inductor", [(False, True), (True, False)], timeout=110)


@pytest.mark.sweep
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_products_on_three_ranks(backend: str) -> None:
    run_ranks(_compare, 3, backend, [(False, True), (True, False), (True, True)], timeout=300)


@pytest.mark.parametrize("other", ["", "reader", "gather"])
def test_linears_are_joined_where_nobody_else_reads(other: str) -> None:
    """Nor gathers the same, which then would be sent twice."""
    graph = fx.Graph()
    operators = torch.ops.shardwright
    x, first, second = (graph.placeholder(name) for name in ("x", "first", "second"))
    gathered = graph.call_function(operators.gather_sequence.default, (x, "tp", 1, 8, False, True, False))
    copied = [graph.call_function(operators.copy_to_group.default, (gathered, "tp")) for _ in range(2)]
    one = graph.call_function(F.linear, (copied[0], first, None))
    turned = graph.call_method("t", (second,))  # behind the first reader
    found = [one, graph.call_function(F.linear, (copied[1], turned, None))]
    if other:
        found.append(graph.call_function(torch.sin, (copied[0] if other == "reader" else gathered,)))
    graph.output(tuple(found))
    compiled.share_copies(graph)
    compiled_sequence.read_by_shards(graph)
    compiled_products.join_linears(graph)
    graph.lint()
    joined = [node for node in graph.nodes if compiled.calls(node, "gathered_linears")]
    assert [node.args for node in joined] == (
        [] if other else [(x, [first, turned], [], [False] * 2, "tp", 1, 8, True, False)]
    )
    left = [node.args[4] for node in graph.nodes if compiled.calls(node, "gather_sequence")]
    assert sorted(left) == {"": [], "reader": [True], "gather": [False, True]}[other]
