"""Numbers, words and objects that modules keep, of which no tensor tells: what one part of a forward puts there another
part may read, in the same forward or in the next one.

Most models change none of them. For the others the dry run goes over a second copy, whose changed places are watched:
who reads one is told by its owner, a module or an object, whose class is another one meanwhile; who writes to one is
found by comparing what is there wherever a layer begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from .containers import DEEPEST, PLAIN, items_of, table_of

_VALUES = (bool, int, float, complex, str, bytes, torch.dtype, type(None))
_MISSING = object()


class Place(NamedTuple):
    """Where something is kept: an attribute of what `path` leads to; or all of what is in a list, dict or set there."""

    path: str
    key: str = ""

    def __str__(self) -> str:
        return f"{self.path}.{self.key}".strip(".")


class Actor(NamedTuple):
    """A part of the forward, by the units whose stages run it: all from `low` to `high`, of which the last may be the
    tail. A layer runs in one; what is around layers in all from the next layer on, as far as the module reaches that
    does it.
    """

    low: int
    high: int


@dataclass
class Kept:
    """What a model keeps, by place. `owners` are modules, objects and containers, by path."""

    values: dict[Place, Any] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    _ids: set[int] = field(default_factory=set)

    @staticmethod
    def of(model: nn.Module, others: Iterable[Any] = ()) -> Kept:
        """others: what is not looked into, because the copy of a model shares it with the model."""
        kept = Kept(_ids=set(map(id, others)))
        own = set(vars(nn.Module()))
        for path, module in model.named_modules():
            kept.owners[path] = module
            for key, value in vars(module).items():
                if key not in own:
                    kept._put(Place(path, key), value, 0)
        return kept

    def _put(self, place: Place, value: Any, depth: int) -> None:
        self.values[place] = value
        self._look_into(str(place), value, depth)

    def _look_into(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, PLAIN) or value is None or depth > DEEPEST or id(value) in self._ids:
            return
        if isinstance(value, tuple):
            for number, part in enumerate(value):
                self._look_into(f"{path}[{number}]", part, depth + 1)
            return
        table = table_of(value)
        if table is None:
            return
        self._ids.add(id(value))
        self.owners[path] = value
        items = items_of(table)
        if table is not value:
            for key, part in items:
                self._put(Place(path, key), part, depth + 1)
            return
        self.values[Place(path)] = tuple(items)
        for key, part in items:
            self._look_into(f"{path}[{key!r}]", part, depth + 1)

    def changed(self, now: Kept) -> set[Place]:
        """Places of owners of before in which there is something else now. What happens to tensors is for `Flows`."""
        return {
            place
            for place in (*self.values, *(place for place in now.values if place.path in self.owners))
            if not _same(self.values.get(place, _MISSING), now.values.get(place, _MISSING))
        }

    def leading_to(self, containers: Mapping[int, set[Place]]) -> Iterator[tuple[Place, set[Place]]]:
        """Attributes by which `containers`, by id, are reached: each with the places that are in there."""
        for place, value in self.values.items():
            if place.key:
                for found in _containers_in(value, 0):
                    if id(found) in containers:
                        yield place, containers[id(found)]


def _containers_in(value: Any, depth: int) -> Iterator[Any]:
    if value is None or isinstance(value, PLAIN) or depth > DEEPEST:
        return
    table = value if isinstance(value, tuple) else table_of(value)
    if table is None:
        return
    yield value
    if table is value:
        for part in value if isinstance(value, tuple) else (part for _, part in items_of(table)):
            yield from _containers_in(part, depth + 1)


def _same(one: Any, other: Any) -> bool:
    if one is other or (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, _VALUES) and type(one) is type(other) and one == other


class Watched:
    """The places of a model that its forward changes. now: the part of it that runs"""

    def __init__(self, model: nn.Module, places: Iterable[Place], now: Callable[[], Actor]) -> None:
        self._now = now
        self.reads: dict[Place, set[Actor]] = {}
        self.writes: dict[Place, set[Actor]] = {}
        kept = Kept.of(model)
        self._tables: dict[Place, Any] = {}
        names: dict[str, dict[str, set[Place]]] = {}  # by path of the owner, and its attribute
        containers: dict[int, set[Place]] = {}
        for place in places:
            owner = kept.owners.get(place.path)
            if owner is None:
                continue
            if place.key and _can_be_watched(owner):
                names.setdefault(place.path, {}).setdefault(place.key, set()).add(place)
            else:
                containers.setdefault(id(owner), set()).add(place)
            self._tables[place] = owner
        for leading, found in kept.leading_to(containers):
            if _can_be_watched(kept.owners[leading.path]):
                names.setdefault(leading.path, {}).setdefault(leading.key, set()).update(found)
        for path, attributes in names.items():
            _watch(kept.owners[path], attributes, self._read)
        self._before = {place: self._value(place) for place in self._tables}

    def _value(self, place: Place) -> Any:
        owner = self._tables[place]
        table = vars(owner) if isinstance(owner, nn.Module) else table_of(owner)
        return table.get(place.key, _MISSING) if place.key else tuple(items_of(table))

    def _read(self, places: Iterable[Place]) -> None:
        for place in places:
            self.reads.setdefault(place, set()).add(self._now())

    def note_writes(self) -> None:
        """Called where a part of the forward ends."""
        for place, before in self._before.items():
            value = self._value(place)
            if not _same(before, value):
                self._before[place] = value
                self.writes.setdefault(place, set()).add(self._now())


def _can_be_watched(owner: Any) -> bool:
    """Whether its class can be another one: not that of what is written in C."""
    return isinstance(owner, nn.Module) or (bool(type(owner).__flags__ & (1 << 9)) and table_of(owner) is not owner)


def _watch(owner: Any, names: Mapping[str, Iterable[Place]], note: Callable[[Iterable[Place]], None]) -> None:
    base: Any = type(owner)

    def __getattribute__(self: Any, name: str) -> Any:
        if name in names:
            note(names[name])
        return base.__getattribute__(self, name)

    attributes = {
        "__getattribute__": __getattribute__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    owner.__class__ = type(base.__name__, (base,), attributes)
