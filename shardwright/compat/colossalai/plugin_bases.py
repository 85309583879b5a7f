"""The bases that scripts name in annotations and in `isinstance`."""

from __future__ import annotations

from ...plugins import Plugin


class DPPluginBase(Plugin):
    """Plugins whose ranks all see different samples."""


class PipelinePluginBase(Plugin):
    """Plugins that have `execute_pipeline`."""
