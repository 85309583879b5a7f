"""Tensors in what a module is called with and in what it returns."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ..utils.pytree import tree_leaves

_WITHOUT = {bool, int, float, str, type(None), set, OrderedDict}
_REGISTERED = {"_parameters", "_buffers", "_modules"}


def replaced(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """`tree` with the tensors in plain tuples replaced. Other objects stay the very ones, because a module may write
    to them.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) is tuple:
        return tuple(replaced(function, part) for part in tree)
    return tree


def mutable(tree: Any) -> Iterator[Any]:
    """The objects in `tree` that a module could write tensors to."""
    if type(tree) is tuple:
        for part in tree:
            yield from mutable(part)
    elif isinstance(tree, list | dict) or dataclasses.is_dataclass(tree):
        yield tree
    elif hasattr(tree, "__dict__") and not isinstance(tree, torch.Tensor | nn.Module | type):
        yield vars(tree)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def held_by(module: nn.Module) -> Iterator[torch.Tensor]:
    """What `module` and its parts have in attributes, also in lists and dicts there, but for parameters. Asked in every
    call, of every part that runs code of others.
    """
    for part in module.modules():
        if type(part).__module__.startswith("torch.nn.") and not part._forward_hooks and not part._forward_pre_hooks:
            continue
        for name, value in vars(part).items():
            kind = type(value)
            if kind in _WITHOUT or name in _REGISTERED:
                continue
            if isinstance(value, torch.Tensor):
                yield value
            elif isinstance(value, list | tuple):
                yield from (each for each in value if isinstance(each, torch.Tensor))
            elif kind is dict:
                yield from (each for each in value.values() if isinstance(each, torch.Tensor))
        yield from (buffer for buffer in part._buffers.values() if buffer is not None)
