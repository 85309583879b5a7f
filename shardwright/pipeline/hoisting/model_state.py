"""What a model keeps from one call to the next: attributes, buffers, hooks, random numbers; and whether a call has
changed any of it.
"""

from __future__ import annotations

import collections
import copy
import functools
import operator
import random
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch

_OPEN = (list, set, collections.deque)
_OWN_PACKAGES = ("torch", "shardwright")


def module_state(modules: Iterable[object]) -> list[Any]:
    """Attributes, buffers, hooks, and what is in attributes that can change themselves, to be compared by
    `same_state`.
    """
    return [_inside(value) for module in modules for value in vars(module).values()]


class _ByValue(NamedTuple):
    """State of random numbers."""

    state: Any


# by class, how to see what is in an object; None: nothing that could change
_looks: dict[type, Callable[[Any], Any] | None] = {}


def _inside(value: Any) -> Any:
    kind = type(value)
    if kind not in _looks:
        _looks[kind] = _look_of(kind)
    look = _looks[kind]
    return value if look is None else look(value)


def _look_of(kind: Any) -> Callable[[Any], Any] | None:
    if issubclass(kind, dict):
        return lambda value: list(value.values())
    if issubclass(kind, _OPEN):
        return list
    if issubclass(kind, random.Random):
        return lambda value: _ByValue(value.getstate())
    if issubclass(kind, torch.Generator):
        return lambda value: _ByValue(value.get_state().tolist())
    if _is_numpy_generator(kind):
        return lambda value: _ByValue(repr(value.bit_generator.state))
    return (lambda value: list(vars(value).values())) if _has_attributes(kind) else None


@functools.cache
def _is_numpy_generator(kind: Any) -> bool:
    return kind.__module__.startswith("numpy.random") and hasattr(kind, "bit_generator")


@functools.cache
def _has_attributes(kind: Any) -> bool:
    """Whether objects of a class of the model's own may be changed where nobody sees it. Modules are looked at by
    themselves.
    """
    if issubclass(kind, torch.nn.Module | torch.Tensor | type | ModuleType | Enum):
        return False
    if any("__call__" in vars(base) for base in kind.__mro__):
        return False
    return kind.__module__.partition(".")[0] not in _OWN_PACKAGES and getattr(kind, "__dictoffset__", 0) != 0


def buffer_versions(modules: Iterable[torch.nn.Module]) -> dict[int, int]:
    """Of the modules' own buffers, by storage: numbers that grow when somebody writes to them."""
    buffers = [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    return {buffer.untyped_storage().data_ptr(): 0 if buffer.is_inference() else buffer._version for buffer in buffers}


class Kept:
    """Attributes, buffers, hooks of modules, and what is in them, to be put back."""

    def __init__(self, modules: Iterable[object]) -> None:
        self._tables: list[tuple[Any, Any]] = []  # dicts, lists, sets, each with what was in it
        self._generators: list[Callable[[], object]] = []
        for module in modules:
            self._tables.append((vars(module), dict(vars(module))))
            for value in vars(module).values():
                self._keep(value)

    def _keep(self, value: Any) -> None:
        kind: Any = type(value)
        if isinstance(value, dict | list | set | collections.deque):
            self._tables.append((value, copy.copy(value)))
        elif isinstance(value, random.Random):
            self._generators.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            self._generators.append(functools.partial(value.set_state, value.get_state()))
        elif _is_numpy_generator(kind):
            self._generators.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif _has_attributes(kind):
            self._tables.append((vars(value), dict(vars(value))))

    def put_back(self) -> None:
        for table, entries in self._tables:
            table.clear()
            if isinstance(table, dict | set):
                table.update(entries)
            else:
                table.extend(entries)
        for restore in self._generators:
            restore()


def same_state(before: list[Any], after: list[Any]) -> bool:
    if len(before) != len(after):
        return False
    for one, other in zip(before, after, strict=True):
        if one is other or (isinstance(one, _ByValue) and one == other):
            continue
        if not (isinstance(one, list) and isinstance(other, list) and len(one) == len(other)):
            return False
        if not all(map(operator.is_, one, other)):
            return False
    return True


def random_states(device: torch.device) -> list[tuple[Callable[[torch.Tensor], None], torch.Tensor]]:
    states: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = [(torch.set_rng_state, torch.get_rng_state())]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        states.append((lambda state: module.set_rng_state(state, device), module.get_rng_state(device)))
    return states


def other_random_states() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def restore_other_random_states(states: tuple[Any, Any]) -> bool:
    """Whether there was something to restore: the model drew numbers outside of torch."""
    changed = drew_others(states)
    if changed:
        random.setstate(states[0])
        if states[1] is not None:
            sys.modules["numpy"].random.set_state(states[1])
    return changed


def drew_others(states: tuple[Any, Any]) -> bool:
    """Whether numbers were drawn outside of torch since `other_random_states`."""
    plain, from_numpy = other_random_states()
    if from_numpy is None or states[1] is None:
        return bool(plain != states[0])
    before, after = states[1]["state"], from_numpy["state"]
    return bool(plain != states[0] or before["pos"] != after["pos"] or (before["key"] != after["key"]).any())
