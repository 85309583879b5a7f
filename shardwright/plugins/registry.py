"""Plugins by name, for scripts and recipes that choose one by a word."""

from __future__ import annotations

from collections.abc import Callable

from ..utils.errors import nearest
from .base import Plugin
from .deepspeed import DeepSpeedPlugin
from .hybrid.plugin import HybridParallelPlugin
from .low_level_zero import LowLevelZeroPlugin
from .torch_ddp import TorchDDPPlugin
from .torch_fsdp import TorchFSDPPlugin

_PLUGINS: dict[str, Callable[..., Plugin]] = {
    "torch_ddp": TorchDDPPlugin,
    "torch_fsdp": TorchFSDPPlugin,
    "low_level_zero": LowLevelZeroPlugin,
    "hybrid_parallel": HybridParallelPlugin,
    "deepspeed": DeepSpeedPlugin,
}
_OWN = frozenset(_PLUGINS)


def register_plugin(name: str, plugin: Callable[..., Plugin]) -> None:
    """Let `Booster(plugin=name)` and `make_plugin(name, ...)` build this plugin: a subclass of `Plugin`, or a function
    that returns one.

    Registering a name again replaces it; those that come with the package stay.
    """
    if not isinstance(name, str) or not name or name in _OWN:
        raise ValueError(
            f"name={name!r} of a plugin must be a text that is not taken by {', '.join(map(repr, sorted(_OWN)))}"
        )
    if not callable(plugin) or isinstance(plugin, Plugin):
        raise ValueError(
            f"plugin={plugin!r} must be a subclass of shardwright.plugins.Plugin or a function that returns a plugin"
        )
    _PLUGINS[name] = plugin


def make_plugin(name: str, **arguments: object) -> Plugin:
    """The plugin of that name, built with `arguments`."""
    if name not in _PLUGINS:
        raise ValueError(f"plugin={name!r} is not one of {', '.join(map(repr, _PLUGINS))}{nearest(name, _PLUGINS)}")
    plugin = _PLUGINS[name](**arguments)
    if not isinstance(plugin, Plugin):
        raise ValueError(
            f"plugin={name!r}: what was registered returned {plugin!r}; it must return a shardwright.plugins.Plugin"
        )
    return plugin
