"""The names of `base` where policies written for other frameworks look for them."""

from __future__ import annotations

from .base import ModulePolicyDescription, Policy, SubModuleReplacementDescription

__all__ = ["ModulePolicyDescription", "Policy", "SubModuleReplacementDescription"]
