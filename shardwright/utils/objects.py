"""Tensors within objects: what `pytree` does not look into, as dataclasses of scripts and caches of keys and values."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from . import pytree

_DEEPEST = 6


def parts_of(value: Any) -> dict[str, Any] | None:
    """Attributes of an object that holds data by names; None of everything else (tensors, containers, functions)."""
    if isinstance(value, torch.Tensor | Mapping | list | tuple | type) or callable(value):
        return None
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if type(value).__module__.partition(".")[0] in ("torch", "builtins") or not hasattr(value, "__dict__"):
        return None
    return dict(vars(value))


def with_parts(value: Any, parts: Mapping[str, Any]) -> Any:
    """A copy of an object with other attributes."""
    copied = copy.copy(value)
    for name, part in parts.items():
        object.__setattr__(copied, name, part)  # a frozen dataclass has no other way
    return copied


def is_cache(value: Any) -> bool:
    """Whether it is one of transformers' caches of keys and values."""
    return hasattr(value, "get_seq_length")


def without_caches(value: Any) -> Any:
    """`value` with None for the caches in its containers."""
    return pytree.tree_map(lambda leaf: None if is_cache(leaf) else leaf, value)


def tensors_within(value: Any, depth: int = 0, caches: bool = True) -> Iterator[torch.Tensor]:
    """Tensors in containers and objects, nested as they may be. caches: those in caches, too"""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth <= _DEEPEST:
        if isinstance(value, Mapping):
            inner: Any = value.values()
        elif isinstance(value, list | tuple):
            inner = value
        else:
            inner = (parts_of(value) or {}).values()
        for part in inner:
            if caches or not is_cache(part):
                yield from tensors_within(part, depth + 1, caches)


def map_within(function: Callable[[torch.Tensor], Any], value: Any, depth: int = 0) -> Any:
    """`value` with `function` applied to each of its tensors; containers and objects that hold some are new ones."""

    def at(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if depth > _DEEPEST or next(tensors_within(leaf, depth), None) is None:
            return leaf
        parts = parts_of(leaf) or {}
        return with_parts(leaf, {name: map_within(function, part, depth + 1) for name, part in parts.items()})

    return pytree.tree_map(at, value)
