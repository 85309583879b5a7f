"""Activations that are split along the sequence, gathered where linears read them and scattered behind linears.

With S positions, of which rank k holds s_k, tp = n:

    gather     x [.., s_k, I] -> X [.., S, I]    column linears read X    dx = (sum over ranks of dX)[own part]
    scatter    P_k [.., S, O] -> y [.., s_k, O]  y = (sum over ranks of P_k)[own part]    dP_k = all of dy

The bytes of both are those of the all-reduce that they stand for.

[Note: two readers of what was gathered]

Column linears make a part of the gradient of X on every rank, so that the parts are summed as they are dealt out again.
But who else reads X (a router, LoRA's A) computes the same on every rank, and its gradient is whole everywhere: it
counts for this rank's positions alone. So X comes out of the gather twice, as two tensors over the same memory. The
module sees the first one, X; column linears that are called with it take the second one, X1, through the note on X
that `ops.linear` looks for ([Note: one all-reduce for linears that share an input]):

    dx = reduce-scatter of dX1 + own part of dX

The reduce-scatter is launched before the weight gradients are computed, which the linears have left for it. A linear
that is called with something made from X is a reader of X like any other, and all-reduces for itself.

With `again` no linear keeps X for its weight gradient: each keeps x, and the first one that comes in backward starts to
gather it again, while input gradients are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import turns
from ..comm.collectives import all_gather, all_gather_async, reduce_scatter_async
from ..comm.handle import Handle
from .collective import Sizes, gather_for_shards, own_part, reduce_scatter_to_group, split_to_group
from .keeping import keep_result, num_active
from .linear import Link, note_shared
from .sequence_ring import Arriving, start_gather


def gather_sequence(
    x: Tensor,
    group: dist.ProcessGroup,
    dim: int,
    sizes: Sizes,
    weights: Sequence[Tensor] = (),
    again: bool = False,
    in_parts: bool = False,
) -> tuple[Tensor, Any]:
    """X, of which x is this rank's part, and what must live until the linears of `weights` have been called with it.

    weights     those of the column linears that may come
    again       keep x alone, and gather it once more in backward
    in_parts    the first linear multiplies what is there while the rest comes (`ops.sequence_ring`)
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return all_gather(x, group, dim, sizes), None
    link = _SequenceLink(group, dim, sizes)
    weights = list({id(each): each for each in weights}.values())
    link.in_parts = in_parts and not num_active() and not torch.compiler.is_compiling()
    whole, opened, *aliases = _GatherSequence.apply(x, link, *weights)
    if link.parts is not None:
        whole = Arriving.of(whole, link.parts)
    return whole, note_shared(whole, opened, link, weights, aliases, local=x if again else None)


class _SequenceLink(Link):
    """Also knows how x is gathered again."""

    def __init__(self, group: dist.ProcessGroup, dim: int, sizes: Sizes) -> None:
        super().__init__(group)
        self.dim, self.sizes = dim, sizes
        self.in_parts = False
        self._gathering: Handle[Tensor] | None = None
        self._whole: Tensor | None = None

    def gather_again(self, local: Tensor) -> None:
        if torch.is_grad_enabled() or self._gathering is not None or self._whole is not None:
            return
        self._gathering = all_gather_async(local.detach(), self.group, self.dim, self.sizes)

    def gathered(self, local: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return gather_for_shards(local, self.group, self.dim, self.sizes)
        self.gather_again(local)
        if self._whole is None:
            assert self._gathering is not None
            self._whole, self._gathering = turns.wait(self._gathering, local), None
        assert self._whole is not None
        return self._whole

    def weight_grads(self, dws: Sequence[Tensor | None], hides: bool) -> list[Tensor | None]:
        if self._gathering is not None or self._whole is not None:
            first = next(iter(self.operands.values()), None)
            if first is None:  # each has taken what was gathered itself
                self._whole = None
            else:
                whole = self.gathered(first[0]).to(first[1].dtype)
                whole = whole.reshape(-1, whole.shape[-1])
                self.operands = {place: (whole, *others) for place, (_, *others) in self.operands.items()}  # type: ignore[misc]
        found = super().weight_grads(dws, hides)
        self._whole = None
        return found


class _GatherSequence(torch.autograd.Function):
    """forward (x, W..) -> (X, X1, W..);  backward: dx of both readers, computing dW.. meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: _SequenceLink, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.set_materialize_grads(False)
        if link.in_parts:
            whole, link.parts = start_gather(x, link.group, link.dim, link.sizes)
        else:
            whole = cast(Tensor, keep_result(lambda: all_gather(x, link.group, link.dim, link.sizes)))
        aliases = [weight.detach() for weight in weights]
        ctx.mark_non_differentiable(
            *(alias for alias, needed in zip(aliases, ctx.needs_input_grad[2:], strict=True) if not needed)
        )
        return whole, whole.detach(), *aliases

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor | None, d_opened: Tensor | None, *dws: Tensor | None) -> Any:
        link = ctx.link
        if torch.is_grad_enabled():  # see [Note: gradients of gradients] in `ops.collective`
            parts = [
                None if d_opened is None else reduce_scatter_to_group(d_opened, link.group, link.dim, link.sizes),
                None if d_whole is None else split_to_group(d_whole, link.group, link.dim, link.sizes),
            ]
            return _sum(parts), None, *dws
        reduction = None
        if d_opened is not None:
            reduction = reduce_scatter_async(d_opened, link.group, link.dim, link.sizes)
        found = link.weight_grads(dws, reduction is not None)
        summed = turns.wait(reduction, d_opened) if reduction is not None and d_opened is not None else None
        own = None if d_whole is None else own_part(d_whole, link.group, link.dim, link.sizes)
        return _sum([summed, own]), None, *found


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return None if not there else there[0] if len(there) == 1 else there[0] + there[1]
