"""Attention on split sequences behind transformers' `AttentionInterface`, so that models use it unmodified.

Every boosted model gets a function of its own, under a name of its own: the function knows the ranks. There is no such
name in transformers' mask interface: who sees whom comes to the function as `masks` has it, a tensor of four dims that
transformers hands on as it is.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import nn

from .ulysses import AttentionFunction

_numbers = itertools.count()
FORMS = ("sdpa", "eager", "flash")


def attention_of(model: nn.Module) -> str:
    """The name of the function that `model` calls now."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None))


def form_of(name: str) -> str | None:
    """The form of mask that the function of this name takes; None where that is not known."""
    return "flash" if name.startswith("flash_attention") else name if name in FORMS else None


def native_function(name: str) -> Callable[[nn.Module], AttentionFunction]:
    """Finds the function of this name for a module; "eager" is one that stands beside the module's class."""

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # late: it takes seconds, and few need it

    def find(module: nn.Module) -> AttentionFunction:
        if name != "eager":
            return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
        for cls in type(module).__mro__:
            function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
            if function is not None:
                return function  # type: ignore[no-any-return]
        raise ValueError(f"{type(module).__name__} computes its eager attention by itself")

    return find


def use_attention(model: Any, function: AttentionFunction, purpose: str) -> None:
    """Let all attention of `model` go through `function`."""
    from transformers import AttentionInterface

    name = f"shardwright_{purpose}_{next(_numbers)}"
    own = WeakSet(model.modules())

    def of_model(module: nn.Module, *args: Any, **options: Any) -> Any:
        if module not in own:
            raise ValueError(
                f"a {type(module).__name__} of another model than the boosted one shares its config, which now names "
                "attention on parts of sequences; build the other model from a copy of the config"
            )
        return function(module, *args, **options)

    AttentionInterface.register(name, of_model)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name
