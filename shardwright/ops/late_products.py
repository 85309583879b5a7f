"""Weight gradients of a compiled layer that wait for a schedule's W (`weight_grad`).

In the graph of a backward that autograd has made, the gradient of a matrix is a product of two tensors, turned or cast
perhaps, that nothing else reads:

    a, b = ..                       a, b = ..
    dW = turned(a b)          ->    return .., None, a, b
    return .., dW

The graph keeps everything else (input gradients, collectives, gradients of biases and norms) and returns the factors.
Whoever runs it leaves the product in the store that is active, or computes it there and then where none is. The
parameter is the one that autograd would have given the gradient to: graphs are shared by layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn

from ..comm.compat import running_node
from .weight_grad import add_product, store_for

_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm.default, _ATEN.bmm.default)
# What may follow a product: other strides, other shapes, another dtype.
_FORMS = (
    _ATEN.t.default,
    _ATEN.permute.default,
    _ATEN.transpose.int,
    _ATEN.view.default,
    _ATEN.reshape.default,
    _ATEN._unsafe_view.default,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
    _ATEN.unsqueeze.default,
    _ATEN.slice.Tensor,
    _ATEN.alias.default,
    _ATEN.detach.default,
    _ATEN.clone.default,
    _ATEN._to_copy.default,
    torch.ops.prims.convert_element_type.default,
)


class _Late(NamedTuple):
    """A gradient that is a product.

    place     among the gradients
    factors   places among what the graph returns behind the gradients
    product   of the two
    forms     what follows: functions with the arguments behind their first
    turned    whether these only transpose (odd times); None where they do more
    """

    place: int
    factors: tuple[int, int]
    product: Callable[..., Tensor]
    forms: tuple[tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]], ...]
    turned: bool | None

    def compute(self, a: Tensor, b: Tensor, into: Tensor | None) -> Tensor | None:
        if self.turned is not None:
            return add_product(*((b.mT, a.mT) if self.turned else (a, b)), into)
        found = self.product(a, b)
        for function, args, kwargs in self.forms:
            found = function(found, *args, **kwargs)
        return found


class LateProducts:
    """The products of one graph.

    inputs   of the graph that was differentiated, gradients of which the graph of its backward returns
    say      told the places of matrices whose gradients do not wait, each once
    """

    def __init__(self, inputs: Sequence[Any], say: Callable[[Sequence[int]], None]) -> None:
        self._say = say
        self._is_matrix = [isinstance(each, nn.Parameter) and each.dim() > 1 for each in inputs]
        self._is_tensor = [isinstance(each, Tensor) for each in inputs]
        self._late: list[_Late] = []
        self._said: set[int] = set()

    def take_out(self, graph: fx.Graph) -> None:
        """Let the graph of a backward return factors in place of products."""
        [end] = [node for node in graph.nodes if node.op == "output"]
        gradients = list(cast(Sequence[Any], end.args[0]))
        factors: dict[fx.Node, int] = {}
        chains = []
        if len(gradients) != len(self._is_matrix):  # inputs that autograd has put together
            self._tell([place for place, is_matrix in enumerate(self._is_matrix) if is_matrix])
            return
        at_once = []
        for place, gradient in enumerate(gradients):
            if not self._is_matrix[place] or gradient is None:
                continue
            chain = _chain(gradient)
            if chain is None:
                at_once.append(place)
                continue
            product, *forms = chain
            found = [factors.setdefault(cast(fx.Node, each), len(factors)) for each in product.args]
            self._late.append(
                _Late(
                    place,
                    (found[0], found[1]),
                    cast(Any, product.target),
                    tuple((cast(Any, form.target), tuple(form.args[1:]), dict(form.kwargs)) for form in forms),
                    _turned(forms),
                )
            )
            gradients[place] = None
            chains.append(chain)
        end.args = ((*gradients, *factors),)
        if (visible := end.meta.get("user_visible_output_idxs")) is not None:
            end.meta["user_visible_output_idxs"] = [place for place in visible if gradients[place] is not None]
        for chain in chains:
            for node in reversed(chain):
                graph.erase_node(node)
        self._tell(at_once)

    def _tell(self, places: Sequence[int]) -> None:
        if new := [place for place in places if place not in self._said]:
            self._said.update(new)
            self._say(new)

    def around(self, backward: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], list[Any]]:
        """The compiled graph that `take_out` has edited, with the gradients it had before."""

        def run(args: list[Any]) -> list[Any]:
            found = list(backward(args))
            gradients, factors = found[: len(self._is_matrix)], found[len(self._is_matrix) :]
            given_to = [node for node, _ in running_node().next_functions]
            edges = iter(given_to)
            # One for each tensor, None where it has no gradient.
            params = [getattr(next(edges), "variable", None) if is_tensor else None for is_tensor in self._is_tensor]
            weights = {param.untyped_storage().data_ptr() for param in params if isinstance(param, nn.Parameter)}
            for late in self._late:
                param, held = params[late.place], (factors[late.factors[0]], factors[late.factors[1]])
                # Weights may be gone when W comes.
                is_free = all(each.untyped_storage().data_ptr() not in weights for each in held)
                store = store_for(param) if is_free else None
                if not is_free:
                    self._tell([late.place])
                if store is None or param is None:
                    gradients[late.place] = late.compute(*held, None)
                else:
                    store.put(param, partial(late.compute, *held), held)
            return gradients

        run._boxed_call = True  # type: ignore[attr-defined]  # it takes its arguments as a list
        return run


def _chain(gradient: fx.Node) -> list[fx.Node] | None:
    """A product and what is done to it, that nothing else reads; None where the gradient is something else."""
    chain = [gradient]
    while chain[0].target in _FORMS:
        before = chain[0].args[0]
        others = [node for node in chain[0].all_input_nodes if node is not before]
        if not isinstance(before, fx.Node) or others:
            return None
        chain.insert(0, before)
    if chain[0].target not in _PRODUCTS or any(len(node.users) != 1 for node in chain):
        return None
    return chain


def _turned(forms: Sequence[fx.Node]) -> bool | None:
    odd = False
    for form in forms:
        if _is_transpose(form):
            odd = not odd
        elif form.target not in (_ATEN.detach.default, _ATEN.alias.default):
            return None
    return odd


def _is_transpose(form: fx.Node) -> bool:
    """Of the last two dims."""
    dims = form.args[0].meta["val"].dim()  # type: ignore[union-attr]
    if form.target is _ATEN.transpose.int:
        return {cast(int, dim) % dims for dim in form.args[1:]} == {dims - 1, dims - 2}
    order = [cast(int, dim) % dims for dim in cast(Any, form.args[1])] if form.target is _ATEN.permute.default else []
    return form.target is _ATEN.t.default or order == [*range(dims - 2), dims - 1, dims - 2]
