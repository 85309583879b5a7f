"""The names of `base` and `descriptions` where policies written for other frameworks look for them."""

from __future__ import annotations

from .base import Policy
from .descriptions import ModulePolicyDescription, SubModuleReplacementDescription

__all__ = ["ModulePolicyDescription", "Policy", "SubModuleReplacementDescription"]
