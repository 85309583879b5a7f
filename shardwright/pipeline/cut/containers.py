"""Lists, dicts and objects that a layer is given and changes: a way past its output, which no message follows.

What is in those that a call's arguments lead to is noted before the call and compared behind it.
"""

from __future__ import annotations

from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ...utils import pytree

DEEPEST = 4
PLAIN = (torch.Tensor, torch.nn.Module, type, ModuleType, Enum, str, bytes, int, float, complex, torch.dtype)


class Change(NamedTuple):
    """What a call has done to a container.

    container  the list, dict or object
    place      where the call had it from
    is_list    whether places in it have no names
    is_plain   whether all that it did was to put tensors there
    """

    container: Any
    place: str
    is_list: bool
    is_plain: bool


class _Noted(NamedTuple):
    container: Any
    place: str
    items: list[tuple[Any, Any]]


class Containers:
    """What is in the containers that the arguments of a call lead to."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._noted: list[_Noted] = []
        self._seen: set[int] = set()
        for number, value in enumerate(args):
            self._note(value, f"its argument number {number + 1}", 0)
        for name, value in kwargs.items():
            self._note(value, f"{name}=", 0)

    def __iter__(self) -> Iterator[Any]:
        return (noted.container for noted in self._noted)

    def _note(self, value: Any, place: str, depth: int) -> None:
        if value is None or isinstance(value, PLAIN) or depth > DEEPEST or id(value) in self._seen:
            return
        if hasattr(value, "get_seq_length"):  # a cache of keys and values, each for the layer that puts them there
            return
        if isinstance(value, tuple):  # what is in it stays
            for part in value:
                self._note(part, place, depth + 1)
            return
        table = table_of(value)
        if table is None:
            return
        self._seen.add(id(value))
        items = items_of(table)
        self._noted.append(_Noted(value, place, items))
        for _, part in items:
            self._note(part, place, depth + 1)

    def changes(self, mark: Callable[[torch.Tensor], torch.Tensor]) -> list[Change]:
        """Of all that were noted. Every tensor that was put into one is replaced by `mark(tensor)`."""
        found = []
        for container, place, before in self._noted:
            table = table_of(container)
            assert table is not None
            now = items_of(table)
            if len(now) == len(before) and all(
                one[0] == other[0] and one[1] is other[1] for one, other in zip(now, before, strict=True)
            ):
                continue
            old = dict(before)
            put = [(key, value) for key, value in now if key not in old or old[key] is not value]
            is_plain = not isinstance(container, set) and len(now) == len(before) + sum(
                key not in old for key, _ in put
            )
            for key, value in put:
                leaves = pytree.tree_leaves(value)
                is_plain &= all(isinstance(leaf, torch.Tensor) for leaf in leaves)
                if key is not _UNNAMED and any(isinstance(leaf, torch.Tensor) for leaf in leaves):
                    table[key] = pytree.tree_map_only(torch.Tensor, mark, value)
            found.append(Change(container, place, isinstance(container, list | deque | set), is_plain))
        return found


_UNNAMED = object()


def table_of(value: Any) -> Any:
    """What can be looked into and changed by its keys; None where there is nothing."""
    if isinstance(value, dict | UserDict | list | deque | set):
        return value
    module = type(value).__module__.partition(".")[0]
    if callable(value) or module == "torch" or not hasattr(value, "__dict__"):
        return None
    return vars(value)


def items_of(table: Any) -> list[tuple[Any, Any]]:
    if isinstance(table, dict | UserDict):
        return list(table.items())
    return [(_UNNAMED, value) for value in table] if isinstance(table, set) else list(enumerate(table))
