"""Caches of keys and values that layers are given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from .config import config_of, text_config

_OFF_IN_TRAINING = "_shardwright_trains_without_cache"


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


def keep_caches_off_in_training(module: nn.Module) -> None:
    """Let `module` make no cache while it trains, as one whose layers transformers recomputes: with a cache models take
    the documents of a packed row for one text.
    """
    names = list(inspect.signature(module.forward).parameters)
    if config_of(module) is None or "use_cache" not in names:  # a layer is told by its model
        return
    place = names.index("use_cache")

    def without(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not module.training:
            return None
        given = args[place] if len(args) > place else kwargs.get("use_cache")
        if not (given if given is not None else _of_config(module)):
            return None
        if len(args) > place:
            return (*args[:place], False, *args[place + 1 :]), kwargs
        return args, {**kwargs, "use_cache": False}

    module.register_forward_pre_hook(without, with_kwargs=True)
    setattr(module, _OFF_IN_TRAINING, True)


def makes_cache(model: nn.Module, given: Any) -> bool:
    """Whether a call of `model` with `use_cache=given` makes a cache; None stands for what its config says."""
    if model.training and any(
        hasattr(module, _OFF_IN_TRAINING) or getattr(module, "gradient_checkpointing", False)
        for module in model.modules()
    ):
        return False
    return bool(given if given is not None else _of_config(model))


def _of_config(model: nn.Module) -> bool:
    return bool(getattr(text_config(model), "use_cache", False))


def refuse_caches(batch: Any) -> None:
    """ValueError for a batch that asks for keys and values of all layers, or brings some, where a rank has a few of the
    layers.
    """
    for name, value in batch.items() if isinstance(batch, Mapping) else ():
        if hasattr(value, "get_seq_length") or (name == "use_cache" and value is True):
            raise ValueError(
                f"the batch has {name}={value if value is True else type(value).__name__}, but under pp_size > 1 each "
                "rank has the keys and values of its own layers alone; leave it out, or use pp_size=1"
            )
