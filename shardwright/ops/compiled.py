"""Collectives of tensor-parallel layers as operators that torch.compile keeps in one graph.

What eager code does around them (attributes on tensors, weak references, nodes of autograd that wait for one another)
ends a graph each time. In a graph there is none of it: an operator of a tensor and the name of a group, with its
gradient.

    copy_in     forward  y = x                          backward  dx = sum over ranks of dy
    sum_out     forward  y = sum over ranks of x        backward  dx = dy

Two edits of graphs belong to them. Linears that read the same x are given one copy of it (`share_copies`), so that
their gradients are added before they are summed over the ranks, once. And sums that do not depend on each other are
chained (`keep_order`): a backend may reorder what does not depend on each other, each rank by its own sizes, and ranks
whose shards differ would then sum different things with one another.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx

from ..comm import turns
from ..comm.collectives import all_reduce_in_place

# Each has an argument `after`, its last.
_COLLECTIVES = (
    "sum_over_group",
    "gather_sequence",
    "gathered_linears",
    "scattered_linear",
    "scattered_linear_backward",
    "deal_sequence",
    "trade_heads",
    "ring_attention",
    "ring_attention_backward",
)
_groups: dict[str, dist.ProcessGroup] = {}  # an operator takes no process group, so it finds it by its name


def name_of(group: dist.ProcessGroup) -> str:
    """The name under which the operators find `group`; ask for it before anything is compiled."""
    name = str(group.group_name)
    _groups[name] = group
    return name


def group_of(name: str) -> dist.ProcessGroup:
    return _groups[name]


@torch.library.custom_op("shardwright::sum_over_group", mutates_args=())
def _sum(x: Tensor, group: str, after: Tensor | None = None) -> Tensor:
    """`after`: nothing of it is read, but it is there before this begins."""
    total = x.clone(memory_format=torch.contiguous_format)
    turns.run(all_reduce_in_place, total, group=_groups[group])
    return total


@torch.library.custom_op("shardwright::copy_to_group", mutates_args=())
def _copy(x: Tensor, group: str) -> Tensor:
    return x.clone()


@_sum.register_fake
def _(x: Tensor, group: str, after: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


@_copy.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _keep_group(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.group = inputs[1]


_sum.register_autograd(lambda ctx, dy: (dy, None, None), setup_context=_keep_group)
_copy.register_autograd(lambda ctx, dy: (_sum(dy, ctx.group), None), setup_context=_keep_group)


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """See `ops.linear.column_linear`."""
    return F.linear(_copy(x, group), weight.t() if transposed else weight, bias)


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, transposed: bool) -> Tensor:
    """See `ops.linear.row_linear`."""
    y = _sum(F.linear(x, weight.t() if transposed else weight), group)
    return y if bias is None else y + bias.to(y.dtype)


def copy_in(x: Tensor, group: str) -> Tensor:
    """See `ops.collective.copy_to_group`."""
    return cast(Tensor, _copy(x, group))


def sum_out(x: Tensor, group: str) -> Tensor:
    """See `ops.collective.reduce_from_group`."""
    return cast(Tensor, _sum(x, group))


def sum_for_shards(x: Tensor, group: str) -> Tensor:
    """The sum over the ranks, which every rank reads for a part of the result: its gradient is summed too."""
    return cast(Tensor, _copy(_sum(x, group), group))


def share_copies(graph: fx.Graph) -> None:
    """Let all that copy the same tensor in, for the same ranks, read one copy. For graphs of forwards."""
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if calls(node, "copy_to_group"):
            kept = first.setdefault(node.args, node)
            if kept is not node:
                node.replace_all_uses_with(kept)
                graph.erase_node(node)


def keep_order(graph: fx.Graph) -> None:
    """Let every collective wait for the one that stands before it, and take out copies that nothing needs any more.
    For graphs that autograd has been through.
    """
    last = None
    returned = {node for end in graph.nodes if end.op == "output" for node in end.all_input_nodes}
    for node in list(graph.nodes):
        if calls(node, "copy_to_group") and node not in returned:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif any(calls(node, name) for name in _COLLECTIVES):
            place = [argument.name for argument in node.target._schema.arguments].index("after")  # type: ignore
            # What inductor goes by to lay arguments out as they were traced, which are others now; any layout will do.
            node.meta.pop("eager_input_vals", None)
            if last is not None:
                node.args = (*node.args[:place], last)
            last = _something_of(node, graph)


def _something_of(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """A tensor that is there when `node` has been computed."""
    results = node.meta.get("val")
    if not isinstance(results, (tuple, list)):
        return node
    with graph.inserting_after(node):
        first = graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = results[0]
    return first


def calls(node: fx.Node, name: str) -> bool:
    packet = getattr(torch.ops.shardwright, name, None)  # None: no module that has it was imported
    return packet is not None and node.op == "call_function" and node.target in (packet, packet.default)
