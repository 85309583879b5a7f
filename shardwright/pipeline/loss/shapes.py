"""Rules for functions that lay out, cut and join tensors (`rules`): where the samples are afterwards, and how many
rows they make.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch

from .facts import Axis, Count, Fact, Kind, Number, first_unknown, unknown
from .rules import HALVES, Call, Rule, elementwise, named
from .samples import sample_of


def view(call: Call) -> Fact:
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS:
        return elementwise(call)
    sizes = call.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    if not sizes and "shape" in call.kwargs:
        sizes = tuple(call.kwargs["shape"])
    if not sizes or not all(isinstance(size, int) for size in sizes) or fact.dim is None:
        return (
            fact.without_origin()
            if sizes and isinstance(sizes[0], torch.dtype)
            else unknown(f"{call.name}{tuple(call.args[1:])} has no samples left")
        )
    return reshaped(call, fact, tuple(call.first.shape), tuple(call.result.shape), tuple(sizes))


def reshaped(call: Call, fact: Fact, old: tuple[int, ...], new: tuple[int, ...], given: tuple[int, ...]) -> Fact:
    """Rows [*before, n, *behind] laid out anew as `new`, which was asked for as `given`."""
    dim = fact.dim
    assert dim is not None
    if math.prod(old[:dim]) != 1:  # something stands before the samples: it must stay as it is
        if new[:dim] == old[:dim]:
            inner = reshaped(call, fact._replace(dim=0), old[dim:], new[dim:], given[dim:])
            return inner._replace(dim=inner.dim + dim) if inner.kind is Kind.ROWS and inner.dim is not None else inner
        rest = math.prod(new[1:]) if new else 0
        if len(new) and given[0] == -1 and fact.axis is not None and rest:
            factor = Fraction(math.prod(old[:dim]) * math.prod(old[dim + 1 :]), rest)
            return fact.without_origin()._replace(
                dim=0, axis=fact.axis.times(factor), order=("mixed", old[:dim], fact.order)
            )
        return unknown(f"{call.name} mixes samples with the dims before them")
    behind = math.prod(old[dim + 1 :])
    free = [
        place for place, size in enumerate(given) if size == -1 or (isinstance(size, Count) and size.axis is not None)
    ]
    place = free[0] if free else dim if dim < len(new) and new[dim] == old[dim] else None
    if place is None and call.watch.trusting and new:
        place = 0
    if place is None or math.prod(new[:place]) != 1:
        return unknown(f"{call.name} to {list(new)} does not keep the samples of the batch on a dim of their own")
    after = math.prod(new[place + 1 :])
    if not after or not behind:
        return fact.without_origin()._replace(dim=place)
    factor = Fraction(behind, after)
    if factor == 1:
        return fact._replace(dim=place, samples=False, recipe=None, mask=fact.mask if len(new) == 1 else None)
    if fact.order != ():
        return unknown(f"{call.name} groups rows of the batch that are not in the order of its samples")
    if factor.numerator != 1 and factor.denominator != 1:
        return unknown(f"{call.name} to {list(new)} does not keep the samples of the batch apart")
    return fact.without_origin()._replace(dim=place, axis=fact.axis.times(factor) if fact.axis is not None else None)


def alike(call: Call) -> Fact:
    """to, type_as: another tensor lends its dtype alone. view_as, expand_as: its shape."""
    fact = call.facts[0]
    if (
        call.name in ("view_as", "reshape_as")
        and fact.kind is Kind.ROWS
        and fact.dim is not None
        and len(call.facts) > 1
    ):
        other = call.facts[1]
        given = tuple(-1 if dim == other.dim else size for dim, size in enumerate(call.tensors[1].shape))
        return reshaped(call, fact, tuple(call.first.shape), tuple(call.result.shape), given)
    call.facts, call.tensors = call.facts[:1], call.tensors[:1]
    return elementwise(call)


def flatten(call: Call) -> Fact:
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS:
        return elementwise(call)
    ndim = call.first.dim()
    start = call.argument(1, "start_dim", default=0)
    end = call.argument(2, "end_dim", default=-1)
    if call.name == "ravel" or not isinstance(start, int) or not isinstance(end, int):
        start, end = 0, -1
    if fact.dim is None or not ndim:
        return (
            fact.without_origin()._replace(dim=0)
            if call.result.dim() == 1
            else unknown(f"{call.name} has no samples left")
        )
    start, end = start % ndim, end % ndim
    given = (*call.first.shape[:start], -1, *call.first.shape[end + 1 :])
    if not start <= fact.dim <= end:
        return fact.without_origin()._replace(dim=fact.dim - (end - start if fact.dim > end else 0))
    return reshaped(call, fact, tuple(call.first.shape), tuple(call.result.shape), given)


def unflatten(call: Call) -> Fact:
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS or fact.dim is None:
        return elementwise(call) if fact.kind is not Kind.ROWS else unknown("unflatten has no samples left")
    dim = call.argument(1, "dim") % call.first.dim()
    sizes = tuple(call.argument(2, "sizes", "unflattened_size"))
    if dim != fact.dim:
        return fact.without_origin()._replace(dim=fact.dim + (len(sizes) - 1 if dim < fact.dim else 0))
    shape = tuple(call.first.shape)
    return reshaped(call, fact, shape, tuple(call.result.shape), (*shape[:dim], *sizes, *shape[dim + 1 :]))


def reorder(call: Call) -> Fact:
    """transpose, permute, movedim, .T: a tensor whose every dim has its own length tells where the samples go."""
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS or fact.dim is None:
        return elementwise(call) if fact.kind is not Kind.ROWS else fact.without_origin()
    marked = torch.empty(tuple(range(1, call.first.dim() + 1)), device="meta")
    return fact.without_origin()._replace(
        dim=call.func(marked, *call.args[1:], **call.kwargs).shape.index(fact.dim + 1)
    )


def squeeze(call: Call) -> Fact:
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS or fact.dim is None:
        return elementwise(call) if fact.kind is not Kind.ROWS else fact
    dim, ndim = call.argument(1, "dim"), call.first.dim()
    dims = range(ndim) if dim is None else [one % ndim for one in (dim if isinstance(dim, tuple | list) else (dim,))]
    gone = [one for one in dims if call.first.shape[one] == 1]
    if fact.dim in gone:
        return fact.without_origin()._replace(dim=None)
    return fact._replace(dim=fact.dim - sum(one < fact.dim for one in gone), recipe=None, samples=False)


def unsqueeze(call: Call) -> Fact:
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS or fact.dim is None:
        return elementwise(call) if fact.kind is not Kind.ROWS else fact
    dim = call.argument(1, "dim") % (call.first.dim() + 1)
    return fact._replace(dim=fact.dim + (dim <= fact.dim), recipe=None, mask=None)


def expand(call: Call) -> Fact:
    """expand, repeat, tile: new dims in front, and copies in the others."""
    fact = first_unknown(call.facts) or call.facts[0]
    if fact.kind is not Kind.ROWS or fact.dim is None:
        return (
            elementwise(call)
            if fact.kind in (Kind.CONST, Kind.WHOLE) and len(call.facts) == 1 and not call.numbers
            else (
                fact if fact.kind is Kind.UNKNOWN else unknown(f"{call.name} makes copies of a value for every sample")
            )
        )
    dim = fact.dim + call.result.dim() - call.first.dim()
    if call.result.shape[dim] != call.first.shape[fact.dim]:
        return unknown(f"{call.name} makes copies of the samples of the batch")
    is_column = call.first.dim() == call.result.dim() and call.first.numel() == call.first.shape[fact.dim]
    return fact.without_origin()._replace(dim=dim, mask=fact.mask if is_column else None)


def repeat_interleave(call: Call) -> Fact:
    fact, times = call.facts[0], call.argument(1, "repeats")
    dim = call.argument(2, "dim")
    if (
        fact.kind is not Kind.ROWS
        or not isinstance(times, int)
        or isinstance(times, Number)
        or fact.dim is None
        or dim is None
    ):
        return (
            elementwise(call)
            if fact.kind is Kind.CONST
            else unknown("repeat_interleave makes copies of the samples of the batch")
        )
    if dim % call.first.dim() != fact.dim:
        return fact.without_origin()
    return fact.without_origin()._replace(axis=fact.axis.times(times) if fact.axis is not None else None)


def pieces(call: Call) -> Fact | list[Fact]:
    """split, chunk, unbind, narrow, select, tensor_split along other dims than that of the samples."""
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS:
        return elementwise(call)
    place = 1 if call.name in ("unbind", "narrow", "select") else 2
    dim = call.argument(place, "dim", default=0) % max(call.first.dim(), 1)
    if call.name == "unbind" and dim == fact.dim and not call.watch.trusting:
        size = call.first.shape[dim]
        return [sample_of(fact, index, size) for index in range(size)]
    if fact.dim is None or dim == fact.dim or call.numbers:
        return unknown(HALVES.format(name=call.name), coupled=True)
    if call.name in ("unbind", "select"):
        return fact.without_origin()._replace(dim=fact.dim - (dim < fact.dim))
    return fact.without_origin()


def join(call: Call) -> Fact:
    """cat and stack."""
    if blame := first_unknown(call.facts):
        return blame
    kinds = {fact.kind for fact in call.facts}
    if Kind.ROWS not in kinds:
        return elementwise(call)
    fact = next(fact for fact in call.facts if fact.kind is Kind.ROWS)
    others = [one for one in call.facts if one.kind is not Kind.ROWS]
    if (
        any(one.kind is not Kind.ROWS or one.dim != fact.dim or one.order != fact.order for one in call.facts)
        or fact.dim is None
    ):
        if others and all(one.kind is Kind.CONST for one in others) and call.watch.trusting:
            return fact.without_origin()
        return unknown(f"{call.name} joins values of samples with others")
    ndim = call.result.dim()
    dim = call.argument(1, "dim", "axis", default=0) % max(ndim, 1)
    if call.name == "stack":
        return fact.without_origin()._replace(dim=fact.dim + (dim <= fact.dim))
    if dim != fact.dim:
        return fact.without_origin()
    axes = [one.axis for one in call.facts]
    base = fact.axis.base if fact.axis is not None else None
    factor: Fraction | None = Fraction(0)
    for axis in axes:
        factor = factor + axis.factor if factor is not None and axis is not None and axis.base is base else None
    joined = Axis(base, factor) if factor is not None else None
    return fact.without_origin()._replace(axis=joined, order=("joined", tuple(one.order for one in call.facts)))


def pad(call: Call) -> Fact:
    """Dims behind the samples grow; cut them or fill them up."""
    fact = call.facts[0]
    if fact.kind is not Kind.ROWS:
        return elementwise(call)
    widths = call.argument(1, "pad")
    if fact.dim is not None and len(widths) // 2 >= call.first.dim() - fact.dim:
        return unknown("pad adds rows to the samples of the batch")
    return fact.without_origin()


SHAPE_RULES: dict[str, Rule] = {
    **named(view, "view reshape"),
    **named(alike, "to type_as view_as reshape_as"),
    **named(flatten, "flatten ravel"),
    **named(unflatten, "unflatten"),
    **named(reorder, "transpose permute movedim moveaxis swapaxes swapdims t T mT H mH adjoint"),
    **named(squeeze, "squeeze"),
    **named(unsqueeze, "unsqueeze"),
    **named(expand, "expand expand_as broadcast_to repeat tile"),
    **named(repeat_interleave, "repeat_interleave"),
    **named(pieces, "split chunk unbind narrow select tensor_split split_with_sizes"),
    **named(join, "cat concat concatenate stack"),
    **named(pad, "pad"),
}
