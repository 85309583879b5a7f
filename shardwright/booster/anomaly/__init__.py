"""Naming what made a loss or a gradient that is not finite, by running the step once more."""

from .namer import Namer, require_nameable

__all__ = ["Namer", "require_nameable"]
