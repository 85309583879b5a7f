"""Shardwright: training for unmodified HuggingFace models over many devices.

Names are looked up when they are first used, so that `import shardwright` stays as light as the interpreter allows.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._moved import explain_moved_modules, missing_name
from ._version import __version__

if TYPE_CHECKING:
    from .booster import Booster
    from .cluster.launch import get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
    from .cluster.recovery import recover
    from .pipeline.batch.ready import Microbatches
    from .pipeline.schedules import register_schedule
    from .plugins.registry import register_plugin
    from .shardformer.policies.auto import register_policy

_HOMES = {
    "Booster": "shardwright.booster",
    "Microbatches": "shardwright.pipeline.batch.ready",
    "get_default_parser": "shardwright.cluster.launch",
    "launch": "shardwright.cluster.launch",
    "launch_from_openmpi": "shardwright.cluster.launch",
    "launch_from_slurm": "shardwright.cluster.launch",
    "launch_from_torch": "shardwright.cluster.launch",
    "recover": "shardwright.cluster.recovery",
    "register_plugin": "shardwright.plugins.registry",
    "register_policy": "shardwright.shardformer.policies.auto",
    "register_schedule": "shardwright.pipeline.schedules",
}
_SUBPACKAGES = (
    "accelerator",
    "booster",
    "checkpoint",
    "cluster",
    "comm",
    "elastic",
    "interface",
    "lazy",
    "logging",
    "models",
    "ops",
    "optim",
    "pipeline",
    "plugins",
    "precision",
    "shardformer",
    "spec",
    "testing",
    "utils",
    "zero",
)

explain_moved_modules()

__all__ = [
    "Booster",
    "Microbatches",
    "__version__",
    "get_default_parser",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "recover",
    "register_plugin",
    "register_policy",
    "register_schedule",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _SUBPACKAGES:
        value = importlib.import_module(f"shardwright.{name}")
    else:
        raise missing_name(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_SUBPACKAGES})
