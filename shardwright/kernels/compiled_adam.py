"""The kernel "compiled" of `kernels.adam`: inductor makes one loop of the pass, which reads and writes each element
once. One graph serves pieces of every length, and rates that change are numbers in a tensor: nothing is compiled anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..utils.pytree import current_dispatch_mode
from .adam import Piece, Rule

backend = "inductor"  # what tests that need no fast code replace


class CompiledAdam:
    def __call__(self, number: int, pieces: Sequence[Piece], rule: Rule, factor: Tensor, skip: Tensor | None) -> None:
        steps = [piece.step for piece in pieces]
        torch._foreach_add_(steps, 1)
        for piece in pieces:
            flat = (piece.master, piece.grad, piece.exp_avg, piece.exp_avg_sq, piece.weight)
            numbers, is_coupled = _numbers(rule, piece.step, factor), bool(rule.weight_decay) and not rule.decoupled
            # No element or one would have graphs of their own, and modes want to look at every operator.
            compiles = piece.master.numel() > 1 and current_dispatch_mode() is None
            function = _compiled(*_kind(piece, skip, is_coupled)) if compiles else _pass
            function(*flat, numbers, skip, is_coupled)
        if skip is not None:
            torch._foreach_sub_(steps, [skip] * len(steps))


def _numbers(rule: Rule, step: Tensor, factor: Tensor) -> Tensor:
    """[9] fp32: what the pass needs of the rule, the step that is taken and the factor, computed in fp64."""
    taken = step.double()
    lr, decay = rule.lr, rule.weight_decay if rule.decoupled else 0.0
    if isinstance(lr, Tensor):  # with masters in host memory
        lr = lr.to(step.device)
    wide = factor.double()
    rest = torch.tensor(
        [1 - lr * decay, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.weight_decay],
        dtype=torch.float64,
        device=step.device,  # a script may have made another the default
    )
    size = lr / (1 - rule.beta1**taken)
    root = (1 - rule.beta2**taken).sqrt()
    return torch.cat([torch.stack([-wide if rule.maximize else wide, size, root]), rest]).float()


def _pass(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    weight: Tensor | None,
    numbers: Tensor,
    skip: Tensor | None,
    is_coupled: bool,
) -> None:
    factor, size, root, decay, rest1, beta2, rest2, eps, coupled = numbers.unbind()
    g = grad.float() * factor
    if is_coupled:
        g = g + coupled * master
    m = exp_avg + rest1 * (g - exp_avg)
    v = beta2 * exp_avg_sq + rest2 * g * g
    w = master * decay - size * m / (v.sqrt() / root + eps)
    if skip is not None:
        m, v, w = (torch.where(skip > 0, old, new) for old, new in ((exp_avg, m), (exp_avg_sq, v), (master, w)))
    master.copy_(w)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    if weight is not None:
        weight.copy_(w)


def _kind(piece: Piece, skip: Tensor | None, is_coupled: bool) -> tuple[Any, ...]:
    """What a graph is made for, beside lengths."""
    return piece.grad.dtype, None if piece.weight is None else piece.weight.dtype, skip is None, is_coupled


@cache
def _compiled(*kind: Any) -> Any:
    """torch compiles a piece of code 8 times and then raises; a process that trains in several precisions needs more.
    So every kind has code of its own.
    """
    code = _pass.__code__.replace(co_name="_pass_of_" + "_".join(map(str, kind)))
    own = FunctionType(code, _pass.__globals__, code.co_name)
    return torch.compile(own, fullgraph=True, dynamic=True, backend=backend)
