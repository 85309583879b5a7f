"""What a rank holds, put on the time scale of its schedule: one column after the other, each as high as the most that
there is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...pipeline.planning.actions import COMPUTE, Action
from ...pipeline.timeline import MeasuredSpan
from ...planner.curves import Curve, Stretch

_MOST = 1500  # columns of a rank; of more, the highest of each group is drawn


class Column(NamedTuple):
    start: float
    end: float
    stretch: Stretch


def columns(curve: Curve, spans: Sequence[MeasuredSpan], computed: float, seconds: float) -> list[Column]:
    """`computed`: when all ranks have computed; what is behind the last action reaches from there to `seconds`.

    Sends, receives and reductions take no time of their own: they stand in the pause behind the action before them, and
    where there is none, with it.
    """
    times = {str(action): (start, end) for action, start, _, end in spans}
    found: list[Column] = []
    at = 0.0
    pause: list[Stretch] = []

    def close(until: float) -> None:
        """The pause from `at` on."""
        nonlocal at
        if not pause and found and until > at:
            left = found[-1].stretch.left
            pause.append(Stretch("waiting", sum(amount for _, amount in left), left, left))
        if not pause:
            return
        most = max(pause, key=lambda stretch: stretch.most)
        if until > at or not found:
            found.append(Column(at, until, most))
        elif most.most > found[-1].stretch.most:
            found[-1] = found[-1]._replace(stretch=most)
        at = max(at, until)
        pause.clear()

    behind = False
    for stretch in curve.stretches:
        if stretch.name in times:
            start, end = times[stretch.name]
            close(start)
            found.append(Column(start, end, stretch))
            at = end
        else:
            if not behind and not _is_action(stretch.name) and found:
                close(computed)
                behind, at = True, max(at, computed)
            pause.append(stretch)
    close(seconds)
    return _fewer(found)


def _is_action(name: str) -> bool:
    try:
        return Action.parse(name).kind not in COMPUTE
    except ValueError:
        return False


def _fewer(every: Sequence[Column]) -> list[Column]:
    size = math.ceil(len(every) / _MOST)
    groups = [every[start : start + size] for start in range(0, len(every), size)]
    return [_joined(group) for group in groups]


def _joined(group: Sequence[Column]) -> Column:
    highest = max(group, key=lambda column: column.stretch.most)
    return Column(group[0].start, group[-1].end, highest.stretch)


def highest(every: Iterable[Column]) -> Column:
    """The first of the highest."""
    return max(every, key=lambda column: column.stretch.most)


def fewer_spans(spans: Sequence[MeasuredSpan], least: float) -> list[MeasuredSpan]:
    """Those that can be told apart at `least` seconds; each of them stands for what is too short behind it."""
    if len(spans) <= _MOST:
        return list(spans)
    found: list[MeasuredSpan] = []
    for span in spans:
        if found and span.end - found[-1].ready < least:
            found[-1] = found[-1]._replace(end=max(span.end, found[-1].end))
        else:
            found.append(span)
    return found
