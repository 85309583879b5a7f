"""Actions of a long schedule looked up in a short one that has the same kinds of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..pipeline.planning.actions import Action, Kind
from ..pipeline.planning.placement import Placement


class Sort(NamedTuple):
    """What an action does, but for the microbatch.

    joined  the chunk of the forward that runs together with this backward, or of the backward with this forward
    """

    kind: Kind
    chunk: int
    joined: int | None = None


class Place(NamedTuple):
    """The `number`th of its sort in a step."""

    sort: Sort
    number: int


def places(actions: Sequence[Action], placement: Placement) -> Iterator[Place]:
    """Of the actions of one rank."""
    seen = Counter[Sort]()
    for index, action in enumerate(actions):
        joined = None
        if action.kind is Kind.FB:
            joined = placement.chunk_of(actions[index + 1].stage)
        elif index and actions[index - 1].kind is Kind.FB:
            joined = placement.chunk_of(actions[index - 1].stage)
        sort = Sort(action.kind, placement.chunk_of(action.stage), joined)
        yield Place(sort, seen[sort])
        seen[sort] += 1


def like(place: Place, there: Counter[Sort], here: Counter[Sort], rounds: tuple[int, int] = (1, 1)) -> Place | None:
    """The one of the short schedule that does the same: as far from the first or the last of its sort, or the one in
    the middle, where weight gradients wait as long as they do all the time; None where it has none.

    there, here   how many there are of every sort, in the long and in the short schedule
    rounds        in how many of them what they do comes again, in both: one in the middle stands where it does in its
                  round
    """
    sort, number = place
    count, most = there[sort], here[sort]
    if not most:
        return None
    behind, half = count - 1 - number, most // 2
    if count > most and number >= half and behind >= most - half:
        first = half // rounds[1] * rounds[1]
        return Place(sort, min(first + _as_far(number % rounds[0], *rounds), most - 1))
    if number <= behind:
        return Place(sort, min(number, half))
    return Place(sort, max(most - 1 - behind, half))


def _as_far(number: int, count: int, most: int) -> int:
    """As far from the first or the last of `most` as the number from that of `count`, else in the middle."""
    behind = count - 1 - number
    return min(number, most // 2) if number <= behind else max(most - 1 - behind, most // 2)
