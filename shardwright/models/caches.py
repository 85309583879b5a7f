"""Caches of keys and values that layers are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_past(value: Any) -> bool:
    """Whether it stands for the slices of a sequence that came before, in a pipeline that cuts sequences. A layer that
    gets one may be run once more: it would write the same to the same places.
    """
    return getattr(value, "is_of_slice", False)


def without_cache(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Inputs of a layer without a cache of keys and values, and whether they have one all the same.

    A layer that writes to a cache would write to it again when it is recomputed, and is compiled anew for every state
    of it. Models make one in every forward (`use_cache` is on unless a config says otherwise); in training, as under
    transformers' own checkpointing, no layer is given it then. A cache that is filled, whose size shows in masks
    (`is_compileable`), or that a model in eval mode makes, is used: its layers must not be recomputed. What stands for
    the slices before (`is_past`) is none of these, and stays.
    """

    def is_cache(value: Any) -> bool:
        return hasattr(value, "get_seq_length") and not is_past(value)

    caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
    if any(not training or getattr(cache, "is_compileable", False) or cache.get_seq_length() for cache in caches):
        return args, dict(kwargs), True
    if not caches:
        return args, dict(kwargs), False
    kept = {name: None if is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if is_cache(value) else value for value in args), kept, False
