"""Units that cannot be parted, and why: one uses what the other hands on by other ways than what it returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from ...models.layer_chain import Unit
from .attributes import Actor, Place
from .containers import Change


class Joints:
    """Of the `units`; behind the last of them comes the tail.

    wrote   units whose layers write in place to a tensor that they have not made
    returned_alike  units that return several tensors of the same memory
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.wrote: set[int] = set()
        self.returned_alike: set[int] = set()
        self._found: dict[tuple[int, int], str] = {}
        self._changes: dict[int, list[tuple[int, Change]]] = {}  # by id of the container, with the unit
        self._given: dict[int, tuple[Any, set[int]]] = {}  # by its id the container, and the units that get it
        self._first: dict[int, Change] = {}  # of every unit

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(i, j) with i < j; j may be the tail."""
        return tuple(sorted(self._found))

    def join(self, one: int, other: int, why: str) -> None:
        """why: in words"""
        if one != other:
            self._found.setdefault((min(one, other), max(one, other)), why)

    def name(self, unit: int) -> str:
        return self._units[unit].layer if unit < len(self._units) else "what lies behind the layers"

    def given(self, unit: int, containers: Iterable[Any]) -> None:
        """A layer gets containers, of which others may have changed some."""
        for container in containers:
            self._given.setdefault(id(container), (container, set()))[1].add(unit)
            for other, change in self._changes.get(id(container), ()):
                if change.is_list or not change.is_plain:
                    self._join_by(change, other, unit)

    def changed(self, unit: int, changes: Sequence[Change]) -> None:
        """The layer of a unit has changed what it was given."""
        for change in changes:
            self._changes.setdefault(id(change.container), []).append((unit, change))
            self._first.setdefault(unit, change)

    def finish(self) -> None:
        """Of tensors it is known who reads them; the rest the model may read at the end, if it keeps the container, as
        one that it gives to several layers.
        """
        for key, changes in self._changes.items():
            for unit, change in changes:
                if not change.is_plain and len(self._given[key][1]) > 1:
                    self._join_by(change, unit, len(self._units))

    def reads_inside(self, unit: int, inside: int) -> None:
        """A unit reads what the layer of another one has made, and not returned."""
        if inside in self._first:
            self._join_by(self._first[inside], inside, unit)
            return
        does = (
            "writes in place to a tensor that it has not made"
            if inside in self.wrote
            else "returns several tensors of one memory, to one of which the model writes"
            if inside in self.returned_alike
            else "makes it by the way (for a global table or a cached function, where a buffer in each layer would do)"
        )
        self.join(inside, unit, f"{self.name(inside)} {does}, and {self.name(unit)} reads it")

    def _join_by(self, change: Change, one: int, other: int) -> None:
        what = f"the {type(change.container).__name__} that it gets as {change.place}"
        self.join(one, other, f"{self.name(one)} changes {what}, and {self.name(other)} reads it")

    def kept(self, reads: Mapping[Place, Iterable[Actor]], writes: Mapping[Place, Iterable[Actor]]) -> bool:
        """What a part of the forward puts into modules another part reads, now or in the next forward: stages that run
        the one have to run the other. Whether what comes before all layers reads some that it does not put there.
        """
        is_read_first = False
        for place, writers in writes.items():
            for writer, reader in product(writers, reads.get(place, ())):
                why = f"{self._part(writer)} sets {place}, which {self._part(reader)} reads"
                if reader.low < writer.low:
                    self.join(reader.low, writer.low, why)
                if reader.high > writer.high:
                    self.join(writer.high, reader.high, why)
                is_around = reader.low < reader.high
                is_read_first |= is_around and reader.low == 0 and (writer.low > 0 or writer.high < reader.high)
        return is_read_first

    def _part(self, actor: Actor) -> str:
        is_around = actor.low < actor.high
        return f"the model, before {self.name(actor.low)}," if is_around else self.name(actor.low)

    @property
    def reasons(self) -> dict[tuple[int, int], str]:
        return dict(self._found)
