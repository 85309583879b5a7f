"""Linears on local shards: column, row and plain, with overlapped and deferrable weight gradients.

Shapes, with T tokens in any number of leading dims, n the size of the group:

    column   x [T, I]     W [O/n, I]     b [O/n]     y [T, O/n]
    row      x [T, I/n]   W [O, I/n]     b [O]       y [T, O]
    plain    x [T, I]     W [O, I]       b [O]       y [T, O]

`transposed=True` is the Conv1D layout: weights are [in, out], W below stands for their transpose.

[Note: one all-reduce for linears that share an input]

dx of a column linear is a partial sum, to be all-reduced. q, k and v read the same x; gate and up do. Reducing each dx
would send three times what one reduction of the sum sends, so all column linears called on the *same tensor object*
take it through one shared node:

    (x1, w1, ..) = Open(x, W_first, W_siblings..)
    y_first      = linear(x1, w1)           the first caller
    y_sibling    = linear(x1, w_k)          a later caller that the first one has named
    y_other      = linear(x1, W_other)      every other one

Autograd itself counts the users of x1: the backward of Open runs when dx of all of them has been summed, however many
they are and whichever of them the loss depends on. It starts the all-reduce of the sum. First caller and siblings have
left (x, dy) for it in their backward instead of computing dW, so Open computes every dW = dy^T x while the collective
is in flight, waits, and returns all. Everything reaches autograd as ordinary gradients: accumulation hooks fire,
`torch.autograd.grad` works, nothing depends on the engine's order of execution. Who is named and does not come (k and v
of a cross-attention read another x) has no gradient from here. Autograd tells the weight's hooks so, which a script's
do not expect, so weights with such are left out. x knows x1 by a weak reference that the callers' nodes keep alive, so
nothing outlives the graph, and x1 is not used again once x was modified in place.

Alternatives that were not taken: one fused function for declared siblings must be told who they are and computes
projections that a cross-attention does not want; counting siblings by hand goes wrong, silently, when the loss does not
depend on one of them; a copy-to-group at the boundary of the module (`ops.collective.copy_to_group`, right where the
consumers are not linears) cannot overlap.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..comm import turns
from ..comm.collectives import all_reduce_in_place
from ..comm.compat import outputs_are_recorded
from .collective import Sizes, copy_to_group, reduce_from_group, reduce_scatter_to_group
from .fp8 import Fp8Products
from .keeping import keep_result, num_active
from .sequence_ring import Parts, product_of_parts
from .weight_grad import active_store, add_product, deferral_possible, may_be_left_out, store_for

_SHARED = "_shardwright_shared_input"


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup,
    *,
    transposed: bool = False,
    siblings: Sequence[Tensor] = (),
    fp8: Fp8Products | None = None,
) -> Tensor:
    """Column-parallel linear on a replicated x; the output is this rank's columns.

    forward   y = x W^T + b
    dgrad     dx = sum over ranks of dy W, started asynchronously, once for all column linears on this x
    wgrad     dW = dy^T x, db = sum over tokens of dy; dW of the first of them and of its siblings overlap with the
              collective

    siblings  weights of linears that may come with the same x
    fp8       computes the products, if they are in 8 bits; dW is then not left for the collective to hide behind

    See [Note: one all-reduce for linears that share an input].
    """
    if group.size() == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return linear(x, weight, bias, transposed=transposed, fp8=fp8)
    shared = _shared_input(x, group)
    if shared is None:
        link = Link(group)
        distinct = {id(each): each for each in (weight, *siblings)}.values()
        weights = [each for each in distinct if may_be_left_out(each)]
        opened, *aliases = _Open.apply(x, link, *weights)
        shared = note_shared(x, opened, link, weights, aliases)
    # Once: the link holds one pair of factors for each weight.
    place, alias = shared.take(weight)
    if shared.link.parts is not None and (place is None or torch.is_autocast_enabled(x.device.type)):
        shared.link.parts.fill()
    if fp8 is not None:
        y = fp8.linear(shared.opened, alias, bias, weight, transposed)
    else:
        y = _linear(shared.opened, alias, bias, weight, transposed, shared.link, place, shared.local)
    cast(Any, y.grad_fn).opened = shared  # kept for as long as the graph
    return y


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: dist.ProcessGroup,
    *,
    transposed: bool = False,
    scatter_dim: int | None = None,
    scatter_sizes: Sizes | None = None,
    fp8: Fp8Products | None = None,
) -> Tensor:
    """Row-parallel linear on this rank's slice of the features; the output is replicated.

    forward   y = sum over ranks of x W^T, then + b (b is replicated and added once)
    dgrad     dx = dy W
    wgrad     dW = dy^T x, db = sum over tokens of dy

    With `scatter_dim` the sum is reduce-scattered along that dim instead (sequence parallelism), in parts of
    `scatter_sizes`: y and dy hold this rank's part of the tokens, dy is gathered in backward, and db is partial over
    the group.
    """
    if group.size() == 1:
        return linear(x, weight, bias, transposed=transposed, fp8=fp8)
    partial = linear(x, weight, None, transposed=transposed, fp8=fp8)
    if scatter_dim is not None:
        y = reduce_scatter_to_group(partial, group, scatter_dim, scatter_sizes)
    elif outputs_are_recorded(besides=num_active()):
        y = reduce_from_group(partial, group)
    else:
        y = _ReduceFresh.apply(partial, group)
    return y if bias is None else y + bias.to(y.dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    fp8: Fp8Products | None = None,
) -> Tensor:
    """Linear without communication whose weight gradient a `WeightGradStore` can postpone.

    forward   y = x W^T + b
    dgrad     dx = dy W
    wgrad     dW = dy^T x, db = sum over tokens of dy
    """
    if fp8 is not None:
        return fp8.linear(x, weight, bias, weight, transposed)
    # Of a compiled layer `late_products` lets them wait.
    if not torch.compiler.is_compiling() and deferral_possible():
        return _linear(x, weight, bias, weight, transposed)
    return F.linear(x, weight.t() if transposed else weight, bias)


class Link:
    """What the callers' backwards leave for that of `_Open`: x [T, I], dy [T, O] and the layout of W, by the place of
    its weight.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.operands: dict[int, tuple[Tensor, Tensor, bool]] = {}
        self.parts: Parts | None = None  # of x, where they are still on their way

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, of what may still be on its way."""
        parts, self.parts = self.parts, None
        if parts is None or parts.is_complete:
            return F.linear(x, weight, bias)
        y = product_of_parts(parts, weight, bias)
        parts.fill()
        return y

    def gather_again(self, local: Tensor) -> None:
        """Start gathering x from what was kept of it."""
        raise NotImplementedError

    def gathered(self, local: Tensor) -> Tensor:
        """x, gathered again from what was kept of it."""
        raise NotImplementedError

    def weight_grads(self, dws: Sequence[Tensor | None], hides: bool) -> list[Tensor | None]:
        """`dws` with what the operands make in the place of what stands for it; forgets them.

        hides   whether a collective is in flight meanwhile
        """
        found = list(dws)
        for place, operands in sorted(self.operands.items()):
            if found[place] is not None:
                found[place] = _weight_grad(*operands)
        if hides and not self.operands and (store := active_store()) is not None:
            store.run_one_of_others()  # where dW is postponed, one of a microbatch before hides the collective
        self.operands.clear()
        return found


class _Shared:
    """x1 of the note, and w1, w2, .. that nobody has taken yet.

    waiting     id of a weight -> the weight (while it lives, the id is its own), its place and its alias
    local       what x1 was gathered from and is gathered from again in backward, where it is (see `ops.sequence`)
    """

    __slots__ = ("__weakref__", "link", "local", "opened", "waiting")

    def __init__(
        self,
        opened: Tensor,
        link: Link,
        weights: Sequence[Tensor],
        aliases: Sequence[Tensor],
        local: Tensor | None = None,
    ) -> None:
        self.opened, self.link, self.local = opened, link, local
        pairs = zip(weights, aliases, strict=True)
        self.waiting = {id(weight): (weight, place, alias) for place, (weight, alias) in enumerate(pairs)}

    def take(self, weight: Tensor) -> tuple[int | None, Tensor]:
        """Place and alias of a weight that is still to be taken, else the weight itself."""
        _, place, alias = self.waiting.pop(id(weight), (weight, None, weight))
        return place, alias


def note_shared(
    x: Tensor,
    opened: Tensor,
    link: Link,
    weights: Sequence[Tensor],
    aliases: Sequence[Tensor],
    local: Tensor | None = None,
) -> _Shared:
    """Let column linears called with x compute with `opened` and `aliases` of their weights, as long as what this
    returns lives.
    """
    shared = _Shared(opened, link, weights, aliases, local)
    setattr(x, _SHARED, {**getattr(x, _SHARED, {}), link.group: (weakref.ref(shared), x._version)})
    return shared


def _shared_input(x: Tensor, group: dist.ProcessGroup) -> _Shared | None:
    shared, version = getattr(x, _SHARED, {}).get(group, (None, 0))
    return shared() if shared is not None and version == x._version else None


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    param: Tensor,
    transposed: bool,
    link: Link | None = None,
    place: int | None = None,
    local: Tensor | None = None,
) -> Tensor:
    """`weight` is what autograd differentiates, `param` the module's own parameter, which may be the same object.

    place   of the weight in `link`, if its gradient is to be left there
    local   what is kept for backward instead of x, where the gradient is left in `link`

    All column linears on a shared input come through here, with or without a link: when a checkpointed region is
    recomputed, x may have been shared by then, and what is saved for backward must not depend on who comes first.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    # The parameters travel in a tuple, past autograd, which would hand them back as aliases.
    return _Linear.apply(x, weight, bias, (param, bias), transposed, None if place is None else (link, place, local))


def _factors(x: Tensor, dy: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """What dW is the product of."""
    return (x.t(), dy) if transposed else (dy.t(), x)


def _weight_grad(x: Tensor, dy: Tensor, transposed: bool) -> Tensor:
    return torch.mm(*_factors(x, dy, transposed))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        params: tuple[Tensor, Tensor | None],
        transposed: bool,
        link: tuple[Link, int, Tensor | None] | None,
    ) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        local = None if link is None else link[2]
        kept = x if local is None else local
        ctx.save_for_backward(kept if need_weight else None, weight if need_x else None)
        ctx.x_shape, ctx.params, ctx.transposed = x.shape, params, transposed
        ctx.link, ctx.is_local = None if link is None else link[:2], local is not None
        weight = weight.t() if transposed else weight
        y = F.linear(x, weight, bias) if link is None else link[0].product(x, weight, bias)
        # With a bias torch returns a view, and refuses to change a view that a function has returned in place, as
        # nn.ReLU(inplace=True) behind the linear does.
        return y.data if bias is not None and x.dim() > 2 and not torch.compiler.is_compiling() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        transposed, (param, bias) = ctx.transposed, ctx.params
        dx = dw = db = None
        if torch.is_grad_enabled() and need_x:
            weight = param.to(weight.dtype)  # what came through _Open takes no gradient but that of a first backward
        flat_dy = dy.reshape(-1, dy.shape[-1])
        if need_weight and ctx.is_local:
            ctx.link[0].gather_again(x)
        if need_x:
            dx = flat_dy.mm(weight.t() if transposed else weight).view(ctx.x_shape)
        if need_weight:
            waits = not torch.is_grad_enabled() and ctx.is_local and store_for(param) is None
            if ctx.is_local and not waits:
                x = ctx.link[0].gathered(x).to(dy.dtype)
            # Where it waits, _Open puts what has been gathered in the place of x.
            flat_x = x.reshape(-1, x.shape[-1])
            if torch.is_grad_enabled():  # gradients of gradients: nothing is postponed or left for others
                dw = _weight_grad(flat_x, flat_dy, transposed)
            elif (store := store_for(param)) is not None:
                store.put(
                    param, lambda into: add_product(*_factors(flat_x, flat_dy, transposed), into), (flat_x, flat_dy)
                )
            elif ctx.link is not None:
                link, place = ctx.link
                link.operands[place] = (flat_x, flat_dy, transposed)
                # Stands in for dW, which _Open computes.
                dw = x.new_empty(()).expand((x.shape[-1], dy.shape[-1]) if transposed else (dy.shape[-1], x.shape[-1]))
            else:
                dw = _weight_grad(flat_x, flat_dy, transposed)
        if need_bias:
            if not torch.is_grad_enabled() and (store := store_for(bias)) is not None:
                store.put(bias, lambda into: flat_dy.sum(0), (flat_dy,))
            else:
                db = flat_dy.sum(0)
        return dx, dw, db, None, None, None


class _Open(torch.autograd.Function):
    """forward (x, W..) -> (x, W..);  backward: sum dx over the ranks, computing dW.. meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.set_materialize_grads(False)
        # aliases, but not views: x may change in place when nothing else needs it
        x, aliases = x.detach(), [weight.detach() for weight in weights]
        ctx.mark_non_differentiable(
            *(alias for alias, needed in zip(aliases, ctx.needs_input_grad[2:], strict=True) if not needed)
        )
        return x, *aliases

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, *dws: Tensor | None) -> tuple[Tensor | None, ...]:
        link, reduction = ctx.link, None
        if torch.is_grad_enabled():  # see [Note: gradients of gradients] in `ops.collective`
            return None if dx is None else reduce_from_group(dx, link.group), None, *dws
        if dx is not None:
            # Only linears use x1, and the gradients of linears are fresh matrices or fresh sums of them: reducing in
            # place is safe.
            dx = dx.contiguous()
            reduction = all_reduce_in_place(dx, link.group, async_op=True)
        found = link.weight_grads(dws, reduction is not None)
        if reduction is not None and dx is not None:
            turns.wait(reduction, dx)
        return dx, None, *found


class _ReduceFresh(torch.autograd.Function):
    """Sum over the ranks of the output of a matrix product that nobody else holds.

    forward   y = sum over ranks of x, in the memory of x
    backward  dx = dy
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(x)

        def reduce() -> Tensor:
            turns.run(all_reduce_in_place, x, group=group)
            return x

        return cast(Tensor, keep_result(reduce, into=x))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return (copy_to_group(dy, ctx.group) if torch.is_grad_enabled() else dy), None
