"""Plugins: how a model, its optimizer and its data are laid out over the processes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._moved import missing_name

if TYPE_CHECKING:
    from ..precision.fp8 import Fp8Options
    from .base import Boosted, Plugin
    from .deepspeed import DeepSpeedPlugin
    from .hybrid.plugin import HybridParallelPlugin
    from .low_level_zero import LowLevelZeroPlugin
    from .registry import make_plugin, register_plugin
    from .torch_ddp import TorchDDPPlugin
    from .torch_fsdp import TorchFSDPPlugin

# Name -> where it lives. Looked up on first use, so that nobody loads what another plugin needs.
_HOMES = {
    "Boosted": "base",
    "DeepSpeedPlugin": "deepspeed",
    "Fp8Options": ".precision.fp8",
    "HybridParallelPlugin": "hybrid.plugin",
    "LowLevelZeroPlugin": "low_level_zero",
    "Plugin": "base",
    "TorchDDPPlugin": "torch_ddp",
    "TorchFSDPPlugin": "torch_fsdp",
    "make_plugin": "registry",
    "register_plugin": "registry",
}
__all__ = [
    "Boosted",
    "DeepSpeedPlugin",
    "Fp8Options",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "make_plugin",
    "register_plugin",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise missing_name(__name__, name)
    found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
