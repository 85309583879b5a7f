"""Tensor parallelism for HuggingFace models, from plans instead of re-typed forwards."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from .._moved import missing_name

# Name -> where it lives. Looked up on first use, so that the package imports in no time.
_HOMES = {
    "HeadGeometry": "heads",
    "ModelSharder": "sharder",
    "ModulePolicyDescription": "policies.descriptions",
    # users look for it here; shardformer does not use it
    "PipelineGradientCheckpointConfig": "shardwright.pipeline.checkpointing",
    "Plan": "plan",
    "Policy": "policies.base",
    "ShardConfig": "config",
    "ShardFormer": "shardformer",
    "SubModuleReplacementDescription": "policies.descriptions",
    "attention_rules": "rules",
    "get_autopolicy": "policies.auto",
    "mlp_rules": "rules",
    "register_policy": "policies.auto",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home = _HOMES[name]
        return getattr(
            import_module(home if home.startswith("shardwright.") else f"shardwright.shardformer.{home}"), name
        )
    raise missing_name(__name__, name)
