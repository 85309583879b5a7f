"""What equal layers do again and again within an action: seen for some layers and for one more, it can be said for any
number.

    C0 A A C1       what an action allocates, in bytes; a layer makes A
    C0 A A A C1     the same with a layer more

What is held at a point that lies as far from the start in both, or as far from the end, rises evenly with the number of
layers. Points of layers in the middle lie between those of the first and the last ones. Where the two do not allocate
alike, as where a bound decides what waits, the highest of each is taken to rise evenly (`Class.rough`).

Weights of layers that are gathered some layers ahead (ZeRO-3) are there for a few layers at a time, however many there
are. A layer that finds as many gathered as one in the middle does needs that many beside it: with fewer, there is none
that lies both as far from the start and as far from the end in the two (`is_steady`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .segments import Segment

Amounts = NDArray[Any]  # [..., labels]


class NotPeriodicError(Exception):
    """Layers do not do the same one after the other."""


class Class(NamedTuple):
    """What an action does to what a rank holds: bytes by label, beside those at its start.

    change  behind it
    top     where there is most of all
    rough   whether layers did not do the same one after the other, or too few of them
    """

    change: Amounts
    top: Amounts
    rough: bool = False


class More(NamedTuple):
    """The same action where a group of equal layers has one more, and how many more the real one has."""

    segment: Segment
    number: float


def extend(segment: Segment, more: Sequence[More]) -> Class:
    """An action of a stage with more layers."""
    more = [each for each in more if each.number]
    count = len(segment.grown)
    points: Amounts = segment.points - segment.start
    end: Amounts = segment.end - segment.start
    for each in more:
        end = end + each.number * (each.segment.end - each.segment.start - (segment.end - segment.start))
    every = [np.zeros((1, points.shape[1]), dtype=np.int64), end[None]]
    try:
        options = [_slopes(segment, each.segment) for each in more]
    except NotPeriodicError:
        top = _top(segment) + sum(each.number * (_top(each.segment) - _top(segment)) for each in more)
        return Class(end, top if top.sum() > max(end.sum(), 0) else np.maximum(end, 0), rough=True)
    for chosen in product((0, 1), repeat=len(more)):
        held: Amounts = points.copy()
        valid = np.ones(count, dtype=bool)
        for option, slopes, each in zip(chosen, options, more, strict=True):
            rise, known = slopes[option]
            held, valid = held + each.number * rise, valid & known
        every.append(held[valid])
    found = np.concatenate(every)
    rough = not all(is_steady(segment, each.segment) for each in more)
    return Class(end, found[found.sum(-1).argmax()], rough)


def is_steady(one: Segment, other: Segment) -> bool:
    """Whether `one`, which has a layer less than `other`, has enough of them for one in the middle to be among them,
    as far as can be seen.
    """
    if not any(other.filled):
        return True
    try:
        (_, alike), (_, alike_behind) = _slopes(one, other)
    except NotPeriodicError:
        return False
    return int((alike & alike_behind).sum()) >= len(other.grown) - len(one.grown)


def _made(segment: Segment) -> Amounts:
    """What its points are known by, [points, 2]."""
    filled = segment.filled or [0] * len(segment.grown)
    return np.stack([np.array(each, dtype=np.int64) for each in (segment.grown, filled)], axis=-1)


def _top(segment: Segment) -> Amounts:
    held = np.concatenate([np.zeros((1, len(segment.start)), dtype=np.int64), segment.points - segment.start])
    found: Amounts = held[held.sum(-1).argmax()]
    return found


def _slopes(one: Segment, other: Segment) -> list[tuple[Amounts, Amounts]]:
    """How much higher every point lies with another layer, [points, labels], and whether that is known: of points
    counted from the start, and from the end.
    """
    first, second = _made(one), _made(other)
    count, further = len(first), len(second) - len(first)
    if further < 0:
        raise NotPeriodicError
    alike = np.cumprod((first == second[:count]).all(-1)).astype(bool)
    alike_behind = np.cumprod((first == second[further:]).all(-1)[::-1])[::-1].astype(bool)
    if not (alike | alike_behind).all():
        raise NotPeriodicError
    mine, others = one.points - one.start, other.points - other.start
    return [
        (np.where(alike[:, None], others[:count] - mine, 0), alike),
        (np.where(alike_behind[:, None], others[further:] - mine, 0), alike_behind),
    ]
