"""Training from a recipe: what `shardwright train` runs, and the loop for scripts."""

import importlib
from typing import TYPE_CHECKING, Any

from .reading import RecipeError, build_recipe, read_recipe
from .recipe import Recipe

if TYPE_CHECKING:
    from .progress import JsonLines, Listener, Log
    from .trainer import Every, Trainer

# What needs torch, which reading a recipe does not wait for.
_HOMES = {"Every": "trainer", "JsonLines": "progress", "Listener": "progress", "Log": "progress", "Trainer": "trainer"}

__all__ = [
    "Every",
    "JsonLines",
    "Listener",
    "Log",
    "Recipe",
    "RecipeError",
    "Trainer",
    "build_recipe",
    "read_recipe",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
