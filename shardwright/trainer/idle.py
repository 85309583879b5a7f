"""Keys of a recipe that would change nothing beside the others: none of them is taken in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from .errors import RecipeError
from .recipe import Recipe, Source


class _Idle(NamedTuple):
    """keys    that change nothing
    when    the recipe is such a one
    why     and what to do, of the recipe
    """

    keys: tuple[str, ...]
    when: Callable[[Recipe], bool]
    why: str


_RULES = (
    _Idle(
        ("eval_data", "per_device_eval_batch_size"),
        lambda recipe: recipe.eval_strategy == "no",
        "eval_strategy: no never tries the model; say eval_strategy: steps or epoch",
    ),
    _Idle(
        ("eval_steps",),
        lambda recipe: recipe.eval_strategy == "no",
        "eval_strategy: no never tries the model; say eval_strategy: steps",
    ),
    _Idle(
        ("eval_steps",),
        lambda recipe: recipe.eval_strategy == "epoch",
        "eval_strategy: epoch tries the model at the end of every pass; say eval_strategy: steps",
    ),
    _Idle(
        ("save_steps", "save_total_limit"),
        lambda recipe: recipe.save_strategy == "no",
        "save_strategy: no writes no checkpoints; say save_strategy: steps",
    ),
    _Idle(
        ("on_save_error",),
        lambda recipe: recipe.save_strategy == "no" and not recipe.keeps_best,
        "save_strategy: no writes no checkpoints; say save_strategy: steps",
    ),
    _Idle(
        ("save_steps",),
        lambda recipe: recipe.save_strategy == "epoch",
        "save_strategy: epoch writes a checkpoint at the end of every pass; say save_strategy: steps",
    ),
    _Idle(
        ("warmup_steps",),
        lambda recipe: recipe.lr_scheduler_type == "constant",
        "lr_scheduler_type: constant does not rise; say lr_scheduler_type: constant_with_warmup",
    ),
    _Idle(
        ("adam_beta1", "adam_beta2", "adam_epsilon"),
        lambda recipe: recipe.optim in ("sgd", "adafactor"),
        "optim: {recipe.optim} does not read it; say optim: adamw_torch",
    ),
)


def check_idle(recipe: Recipe) -> None:
    """RecipeError for a key that was given and has no effect. One with its default is as good as none: the recipe that
    is kept beside a run has them all.
    """
    defaults = {each.name: each.default for each in dataclasses.fields(Recipe)}
    for rule in _RULES:
        for key in rule.keys:
            value = getattr(recipe, key)
            if value != defaults[key] and rule.when(recipe):
                plain = int(value) if isinstance(value, float) and not value % 1 else value
                shown = key if dataclasses.is_dataclass(value) else f"{key}={plain}"
                raise RecipeError(f"{shown}, and {rule.why.format(recipe=recipe)}, or leave {key} out")
    for key in ("warmup_steps", "logging_steps", "eval_steps", "save_steps"):
        steps = getattr(recipe, key) or 0
        if steps > 1 and steps % 1:
            raise RecipeError(f"{key}={steps} is no whole number of steps; give one, or a share of all steps below 1")
    for key in ("logging_steps", "eval_steps", "save_steps"):
        if getattr(recipe, key) == 0:
            raise RecipeError(f"{key}=0 is too small: give a number of steps, or a share of all steps between 0 and 1")


def check_source(name: str, source: Source) -> None:
    """The same of keys that say which part of a `dataset` is read, beside `path`."""
    if source.path is None:
        return
    given: dict[str, Any] = {"name": source.name, "split": source.split}
    defaults = {each.name: each.default for each in dataclasses.fields(Source)}
    for key, value in given.items():
        if value != defaults[key]:
            raise RecipeError(
                f"{name}.{key}={value!r} is of a dataset, and {name}.path names files, all of which are read; give "
                f"{name}.dataset, or leave {key} out"
            )
