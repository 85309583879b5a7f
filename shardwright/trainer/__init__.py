"""Training from a recipe: what `shardwright train` runs, and the loop for scripts."""

from typing import TYPE_CHECKING, Any

from .reading import RecipeError, build_recipe, read_recipe
from .recipe import Recipe

if TYPE_CHECKING:
    from .trainer import Every, Trainer

__all__ = ["Every", "Recipe", "RecipeError", "Trainer", "build_recipe", "read_recipe"]


def __getattr__(name: str) -> Any:
    """What needs torch, when it is first asked for: recipes are read without."""
    if name in ("Every", "Trainer"):
        from . import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
