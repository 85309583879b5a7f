"""Hooks on the modules inside of a layer that runs as one graph.

Dynamo writes what hooks do into a graph when it is traced, and looks no more whether there are others later. So a layer
whose modules have hooks runs as it is, but for three kinds:

    in graph    are there before anything is compiled, stay, and are written into the graph (`in_graph`)
    ahead       may be called before the layer in place of before the module (`ahead`): they see no values
    recorders   transformers' own, which stay where they were installed once and do nothing until outputs are asked for

What has no public name (hooks of all modules) was checked on torch 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

_KIND = "_shardwright_in_graphs"
_DOES = "_shardwright_does"
_RECORDERS = "transformers.utils.output_capturing"
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Inside(NamedTuple):
    """
    watched     whether hooks have to see what happens inside of the layer
    ahead       (module, hook) to be called before it
    in_graph    what those say of themselves that are written into its graph
    """

    watched: bool
    ahead: tuple[tuple[nn.Module, Callable[..., Any]], ...] = ()
    in_graph: tuple[str, ...] = ()


def ahead(hook: _Hook) -> _Hook:
    """Say of a pre-hook hook(module, args) that it may be called with no arguments before the layer that the module is
    in. Within a graph it does nothing.
    """
    setattr(hook, _KIND, "ahead")
    return hook


def in_graph(hook: _Hook, does: object) -> _Hook:
    """Say of a hook that graphs may hold it. Layers share one where what their hooks do is written alike."""
    setattr(hook, _KIND, "in graph")
    setattr(hook, _DOES, str(does))
    return hook


def hooks_inside(layer: nn.Module) -> Inside:
    if nn.modules.module._has_any_global_hook():
        return Inside(True)
    found, held = [], []
    for module, hooks, hook_id, hook in _hooks(layer):
        kind = getattr(hook, _KIND, None)
        if kind == "ahead":
            found.append((module, hook))
        elif kind == "in graph":
            held.append(getattr(hook, _DOES))
        elif kind is None and getattr(hook, "__module__", None) == _RECORDERS:
            hooks[hook_id] = _silenced(hook)
            kind = "recorder"
        if kind is None or (kind == "recorder" and _is_recording()):
            return Inside(True)
    return Inside(False, tuple(found), tuple(held))


def _hooks(module: nn.Module) -> Iterator[tuple[nn.Module, dict[int, Any], int, Callable[..., Any]]]:
    for child in module._modules.values():
        if child is None:
            continue
        for hooks in (child._forward_pre_hooks, child._forward_hooks, child._backward_hooks, child._backward_pre_hooks):
            if hooks:
                for hook_id, hook in list(hooks.items()):
                    yield child, hooks, hook_id, hook
        if child._modules:
            yield from _hooks(child)


def _silenced(hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)  # who looks for transformers' hooks goes by their module
    def record(module: nn.Module, args: Any, output: Any) -> Any:
        return None if torch.compiler.is_compiling() else hook(module, args, output)

    setattr(record, _KIND, "recorder")
    return record


def _is_recording() -> bool:
    recorders = sys.modules.get(_RECORDERS)
    return bool(recorders._active_collector.get()) if recorders is not None else False
