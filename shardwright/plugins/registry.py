"""Plugins by name, for scripts and recipes that choose one by a word."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..utils.errors import nearest
from .base import Plugin

# Those that come with the package, imported when they are asked for: `name -> module:class`.
_OWN = {
    "torch_ddp": "torch_ddp:TorchDDPPlugin",
    "torch_fsdp": "torch_fsdp:TorchFSDPPlugin",
    "low_level_zero": "low_level_zero:LowLevelZeroPlugin",
    "hybrid_parallel": "hybrid.plugin:HybridParallelPlugin",
    "deepspeed": "deepspeed:DeepSpeedPlugin",
}
_REGISTERED: dict[str, Callable[..., Plugin]] = {}


def register_plugin(name: str, plugin: Callable[..., Plugin]) -> None:
    """Let `Booster(plugin=name)` and `make_plugin(name, ...)` build this plugin: a subclass of `Plugin`, or a function
    that returns one.

    Registering a name again replaces it; those that come with the package stay.
    """
    if not isinstance(name, str) or not name or name in _OWN or name != name.strip():
        raise ValueError(
            f"name={name!r} of a plugin must be a text without spaces around it that is not taken by "
            f"{', '.join(map(repr, sorted(_OWN)))}"
        )
    if not callable(plugin) or isinstance(plugin, Plugin):
        raise ValueError(
            f"plugin={plugin!r} must be a subclass of shardwright.plugins.Plugin or a function that returns a plugin"
        )
    _REGISTERED[name] = plugin


def make_plugin(name: str, **arguments: object) -> Plugin:
    """The plugin of that name, built with `arguments`."""
    known = [*_OWN, *_REGISTERED]
    if name not in known:
        raise ValueError(f"plugin={name!r} is not one of {', '.join(map(repr, known))}{nearest(name, known)}")
    if name in _OWN:
        return own_plugin(*_OWN[name].split(":"))(**arguments)
    try:
        plugin = _REGISTERED[name](**arguments)
    except ValueError as error:
        raise ValueError(f"plugin={name!r}, which was registered: {error}") from error
    except Exception as error:
        raise ValueError(
            f"plugin={name!r}, which was registered: its function raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(plugin, Plugin):
        raise ValueError(
            f"plugin={name!r}: what was registered returned {plugin!r}; it must return a shardwright.plugins.Plugin"
        )
    return plugin


def own_plugin(module: str, cls: str) -> Callable[..., Plugin]:
    found: Callable[..., Plugin] = getattr(import_module(f"{__package__}.{module}"), cls)
    return found
