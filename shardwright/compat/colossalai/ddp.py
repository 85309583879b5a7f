"""`TorchDDPPlugin`, whose arguments are the same."""

from __future__ import annotations

from ...plugins import TorchDDPPlugin as NativePlugin
from .plugin_bases import DPPluginBase


class TorchDDPPlugin(NativePlugin, DPPluginBase):
    pass
