"""What is wrong with a recipe, its data or its files."""

from __future__ import annotations


class RecipeError(ValueError):
    """A recipe that cannot be run: one sentence with what would work."""


class RowError(RecipeError):
    """A row that is found in the middle of training, by one rank alone or by several.

    told   whether another rank has found one before, and tells it
    """

    told = False
