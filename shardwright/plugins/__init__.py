"""Plugins: how a model, its optimizer and its data are laid out over the processes."""

from __future__ import annotations

from typing import Any

from .._moved import missing_name
from .base import Boosted, Plugin
from .deepspeed import DeepSpeedPlugin
from .hybrid.plugin import HybridParallelPlugin
from .low_level_zero import LowLevelZeroPlugin
from .registry import make_plugin, register_plugin
from .torch_ddp import TorchDDPPlugin
from .torch_fsdp import TorchFSDPPlugin

__all__ = [
    "Boosted",
    "DeepSpeedPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Plugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
    "make_plugin",
    "register_plugin",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
