"""Plugins: how a model, its optimizer and its data are laid out over the processes."""

from .base import Boosted, Plugin
from .torch_ddp import TorchDDPPlugin
from .torch_fsdp import TorchFSDPPlugin

__all__ = ["Boosted", "Plugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
