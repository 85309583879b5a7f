"""Going over to other random numbers in the middle of a graph, as an operator that torch.compile keeps in it.

    switch_numbers    forward  y = x, and what is drawn behind it is drawn from other numbers    backward  dx = dy

Which numbers these are the host finds out as the operator runs (`shardformer.rng`), so a graph draws what its module
draws without one. Compilers take it for an operator that draws: they keep it, run it once, and in order with all that
draw.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, fx

from .compiled import calls
from .compiled_sequence import no_graph

OPEN, CLOSE = "open", "close"
BEGIN, END = "begin_", "end_"  # what is between the two is put back at the end


class Numbers(Protocol):
    def switch(self, to: str) -> None: ...
    def mark(self) -> Any: ...
    def go_back(self, mark: Any) -> None: ...


_known: dict[str, Numbers] = {}


def name_numbers(name: str, numbers: Numbers) -> str:
    """A name under which the operator finds `numbers`; given before anything is compiled."""
    _known[name] = numbers
    return name


@torch.library.custom_op("shardwright::switch_numbers", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _switch(x: Tensor, numbers: str, to: str) -> Tensor:
    _known[numbers].switch(to)
    return x.clone()


@_switch.register_fake
def _(x: Tensor, numbers: str, to: str) -> Tensor:
    return torch.empty_like(x)


_switch.register_autograd(lambda ctx, dy: (dy, None, None))


def switch_numbers(x: Tensor, numbers: str, to: str) -> Tensor:
    return cast(Tensor, _switch(x, numbers, to))


def at_first(values: Any, numbers: str, to: str) -> Any:
    """In a graph: what a module is given or returns, with a switch at the first tensor of it."""
    if isinstance(values, Tensor):
        return switch_numbers(values, numbers, to)
    if isinstance(values, tuple):
        for place, value in enumerate(values):
            if isinstance(value, Tensor):
                return (*values[:place], switch_numbers(value, numbers, to), *values[place + 1 :])
    no_graph("a module between sharded activations is given or returns no tensor by its place")
    return values


@contextmanager
def put_back_after_errors() -> Iterator[None]:
    """A graph that ends with an error leaves no numbers open that it opened."""
    marks = [(numbers, numbers.mark()) for numbers in _known.values()]
    try:
        yield
    except BaseException:
        for numbers, mark in marks:
            numbers.go_back(mark)
        raise


def draw_in_order(graph: fx.Graph) -> None:
    """Let every operator that draws wait for the one before it, as inductor does by itself from torch 2.13 on; 2.11
    does not. For graphs that autograd has been through.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    draws = [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    ]
    preserve_node_ordering(graph, {node: OrderedSet([last]) for last, node in itertools.pairwise(draws)})


def spare_switches(graph: fx.Graph) -> None:
    """Take out switches to numbers that are drawn from already. For graphs of forwards."""
    drawn: dict[Any, str] = {}
    for node in list(graph.nodes):
        if not calls(node, "switch_numbers"):
            continue
        x, numbers, to = node.args
        if to in (OPEN, CLOSE) and drawn.get(numbers) == to:
            node.replace_all_uses_with(x)
            graph.erase_node(node)
        else:
            drawn[numbers] = to
