"""The names of `base` where policies written for other frameworks look for them."""

from __future__ import annotations

from shardwright.shardformer.policies.base import ModulePolicyDescription, Policy, SubModuleReplacementDescription

__all__ = ["ModulePolicyDescription", "Policy", "SubModuleReplacementDescription"]
