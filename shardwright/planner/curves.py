"""What a rank holds along a step: one stretch of it after the other, each with the most that there is in it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

from .segments import Segments

Held = tuple[tuple[str, int], ...]


class Stretch(NamedTuple):
    """Of a step.

    name   an action of the schedule, or a part of the step
    most   bytes where there is most of all within it
    held   what holds how much of them, most first
    left   what is there behind it
    """

    name: str
    most: int
    held: Held
    left: Held


class Curve(NamedTuple):
    """Of one pipeline rank; `kept` are bytes between steps."""

    rank: int
    kept: int
    stretches: list[Stretch]


def by_holder(labels: Iterable[Hashable], amounts: Any) -> Held:
    """Bytes by name, most first, which sum up to those of `amounts`; these have one for each of the labels, of which
    some have the same name.
    """
    held: dict[str, int] = {}
    for label, amount in zip(labels, amounts, strict=True):
        held[str(label)] = held.get(str(label), 0) + round(float(amount))
    # Where an action stands for one in another order, what it let go of may have another name: a gradient that was sent
    # for a result that was. So one name has less than nothing, and others have as much too much.
    lacking = sum(size for size in held.values() if size < 0)
    if lacking:
        held[max(held, key=lambda what: held[what])] += lacking
    return tuple(sorted(((what, size) for what, size in held.items() if size > 0), key=lambda one: -one[1]))


def curve_of(rank: int, kept: int, segments: Segments) -> Curve:
    """Of a step that was replayed as it is."""
    stretches = []
    for segment in segments.done:
        held = max([segment.start, *segment.points], key=lambda amounts: int(amounts.sum()))
        left = by_holder(segments.labels, segment.end)
        stretches.append(Stretch(str(segment.name), int(held.sum()), by_holder(segments.labels, held), left))
    return Curve(rank, kept, stretches)
