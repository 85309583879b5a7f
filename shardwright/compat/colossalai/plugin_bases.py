"""The bases that scripts name in annotations and in `isinstance`."""

from __future__ import annotations

from typing import Any

from ...plugins import Plugin

# Attributes that are not offered -> what to use.
_ATTRIBUTES = {
    "shard_config": "options of sharding are arguments of the plugin; print(plugin.layout) shows what came of them",
    "scheduler": "booster.execute_pipeline runs the schedule; print(plugin.layout) shows it",
    "schedule": "booster.execute_pipeline runs the schedule; print(plugin.layout) shows it",
    **dict.fromkeys(
        ("control_checkpoint_io", "get_checkpoint_io"),
        "booster.save, booster.load, booster.save_model and booster.load_model",
    ),
    "moe_dp_group": "plugin.mesh.group('expert_dp')",
    "ep_group": "plugin.mesh.group('ep')",
    "amp_config": "precision and the loss scale are arguments of the plugin",
    "zero_config": "zero_stage and its options are arguments of the plugin",
    "ddp_config": "its options are arguments of the plugin",
}


class _Explained(Plugin):
    """Says what to use in place of an attribute that is not offered."""

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__} has no {name!r} here: {_ATTRIBUTES[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class DPPluginBase(_Explained):
    """Plugins whose ranks all see different samples."""


class PipelinePluginBase(_Explained):
    """Plugins that have `execute_pipeline`."""
