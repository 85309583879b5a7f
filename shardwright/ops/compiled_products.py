"""Linears that gather what they read, or deal out what they return, as operators that torch.compile keeps in one graph.

With S positions, of which rank k holds s_k:

    gathered_linears    forward   y_j = X W_j^T + b_j       x [B, s_k, I] -> X [B, S, I], y_j [B, S, O_j]
                        backward  dx = own part of the sum over ranks of sum_j dy_j W_j,  dW_j = dy_j^T X
    scattered_linear    forward   y = own part of the sum over ranks of x W^T
                        backward  dY = all of dy, dx = dY W, dW = dY^T x

    again       x is kept for the backward, and gathered once more there: X is not
    in_parts    X comes in one part for each rank; the first linear multiplies each as it comes, and what is dealt out
                is reduced to a rank while the product of the next is computed (`sequence_ring`)

In the graph of a forward, `join_linears` puts the first in the place of a gather and of all linears that read it. One
that something else reads as well (a router, LoRA's A) is kept for that anyway, and stays.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..comm.collectives import all_gather, even_sizes
from .compiled import calls, group_of
from .compiled_sequence import deal_sum, gather_again, own_size
from .sequence_ring import deal_products, product_of_parts, start_gather


@torch.library.custom_op("shardwright::gathered_linears", mutates_args=())
def _gathered_linears(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    have_bias: list[bool],
    group: str,
    dim: int,
    length: int,
    again: bool,
    in_parts: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    """y_1, y_2, .., and X unless it is gathered `again`."""
    members = group_of(group)
    sizes = even_sizes(length, members.size())
    given = _all_biases(biases, have_bias)
    found = []
    if in_parts:
        whole, parts = start_gather(x, members, dim, sizes)
        found.append(product_of_parts(parts, weights[0], given[0]))
        parts.fill()
    else:
        whole = all_gather(x.contiguous(), members, dim, sizes).contiguous()
    found += [F.linear(whole, *each) for each in list(zip(weights, given, strict=True))[len(found) :]]
    return found if again else [*found, whole]


@_gathered_linears.register_fake
def _(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    have_bias: list[bool],
    group: str,
    dim: int,
    length: int,
    again: bool,
    in_parts: bool,
    after: Tensor | None = None,
) -> list[Tensor]:
    def whole(features: int) -> Tensor:
        shape = [*x.shape[:-1], features]
        shape[dim] = length
        return x.new_empty(shape)

    found = [whole(weight.shape[0]) for weight in weights]
    return found if again else [*found, whole(x.shape[-1])]


def _keep_gathered(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, ctx.have_bias, ctx.group, ctx.dim, ctx.length, ctx.again, *_ = inputs
    ctx.save_for_backward(x if ctx.again else output[-1], *weights)


def _gathered_gradients(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    kept, *weights = ctx.saved_tensors
    dys = dys[: len(weights)]
    whole = gather_again(kept, ctx.group, ctx.dim, ctx.length, dys[0]) if ctx.again else kept
    opened = dys[0] @ weights[0]
    for dy, weight in zip(dys[1:], weights[1:], strict=True):
        opened = opened + dy @ weight
    dws = [_weight_grad(dy, whole) for dy in dys]
    biased = [dy for dy, has in zip(dys, ctx.have_bias, strict=True) if has]
    dbs = [_bias_grad(dy) for dy in biased]
    # One for each input that was given, which `after` is not: torch counts them where some are lists.
    return deal_sum(opened, ctx.group, ctx.dim), dws, dbs, *[None] * 6


_gathered_linears.register_autograd(_gathered_gradients, setup_context=_keep_gathered)


@torch.library.custom_op("shardwright::scattered_linear", mutates_args=())
def _scattered_linear(x: Tensor, weight: Tensor, group: str, dim: int, after: Tensor | None = None) -> Tensor:
    members = group_of(group)
    return deal_products(x, weight, members, dim, even_sizes(x.shape[dim], members.size()))


@_scattered_linear.register_fake
def _(x: Tensor, weight: Tensor, group: str, dim: int, after: Tensor | None = None) -> Tensor:
    shape = [*x.shape[:-1], weight.shape[0]]
    shape[dim] = own_size(x.shape[dim], group)
    return x.new_empty(shape)


@torch.library.custom_op("shardwright::scattered_linear_backward", mutates_args=())
def _scattered_backward(
    dy: Tensor, weight: Tensor, group: str, dim: int, length: int, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """dx, and dY."""
    members = group_of(group)
    whole, parts = start_gather(dy.contiguous(), members, dim, even_sizes(length, members.size()))
    dx = product_of_parts(parts, weight.t(), None)
    parts.fill()
    return dx, whole


@_scattered_backward.register_fake
def _(
    dy: Tensor, weight: Tensor, group: str, dim: int, length: int, after: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    shape = list(dy.shape)
    shape[dim] = length
    return dy.new_empty([*shape[:-1], weight.shape[1]]), dy.new_empty(shape)


def _keep_scattered(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.group, ctx.dim, *_ = inputs
    ctx.save_for_backward(x, weight)


def _scattered_gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx, whole = _scattered_backward(dy, weight, ctx.group, ctx.dim, x.shape[ctx.dim])
    return dx, _weight_grad(whole, x), None, None, None


_scattered_linear.register_autograd(_scattered_gradients, setup_context=_keep_scattered)


def scattered_linear(x: Tensor, weight: Tensor, group: str, dim: int) -> Tensor:
    return _scattered_linear(x, weight, group, dim)


def join_linears(graph: fx.Graph) -> None:
    """Let gathers and the linears that read them, and nobody else, be one operator each. For graphs of forwards, with
    gathers that have been told who reads them (`compiled_sequence.read_by_shards`).
    """
    for node in list(graph.nodes):
        if not calls(node, "gather_sequence") or not any(node.args[5:7]):
            continue
        readers = list(node.users)
        alone = sum(calls(user, "gather_sequence") for user in node.args[0].users) == 1  # type: ignore[union-attr]
        if not (node.args[4] and alone and all(_is_linear_of(reader, node) for reader in readers)):
            continue
        readers.sort(key=list(graph.nodes).index)
        factors = [_factors(reader) for reader in readers]
        if not all(_hoist(factor, readers[0]) for each in factors for factor in each):
            continue
        biases = [bias for _, *rest in factors for bias in rest]
        x, group, dim, length, _, again, in_parts, *_ = node.args
        with graph.inserting_before(readers[0]):
            joined = graph.call_function(
                torch.ops.shardwright.gathered_linears.default,
                (
                    x,
                    [weight for weight, *_ in factors],
                    biases,
                    [len(each) > 1 for each in factors],
                    group,
                    dim,
                    length,
                    again,
                    in_parts,
                ),
            )
            made = [graph.call_function(operator.getitem, (joined, place)) for place in range(len(readers))]
        for reader, one in zip(readers, made, strict=True):
            one.meta.update(reader.meta)
            reader.replace_all_uses_with(one)
            graph.erase_node(reader)
        graph.erase_node(node)


def _is_linear_of(node: fx.Node, x: fx.Node) -> bool:
    """A linear whose input is x, and neither its weight nor its bias."""
    is_linear = node.op == "call_function" and node.target is F.linear
    return is_linear and not node.kwargs and node.args[0] is x and x not in node.args[1:]


def _factors(linear: fx.Node) -> list[fx.Node]:
    """Weight, and bias where there is one."""
    return [each for each in linear.args[1:] if isinstance(each, fx.Node)]


def _hoist(factor: fx.Node, place: fx.Node) -> bool:
    """Whether a parameter, or the transpose of one, is there before `place`; moved there if need be."""
    if factor.op in ("placeholder", "get_attr"):
        return True
    is_transpose = factor.op == "call_method" and factor.target == "t"
    if not is_transpose or factor.args[0].op not in ("placeholder", "get_attr"):  # type: ignore[union-attr]
        return False
    if factor > place:
        place.prepend(factor)
    return True


def _weight_grad(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


def _bias_grad(dy: Tensor) -> Tensor:
    return dy.flatten(0, -2).sum(0)


def _all_biases(biases: Sequence[Tensor], have_bias: Sequence[bool]) -> list[Tensor | None]:
    there = iter(biases)
    return [next(there) if has else None for has in have_bias]
