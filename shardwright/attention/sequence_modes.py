"""Attention on split sequences behind transformers' `AttentionInterface`, so that models use it unmodified.

Every boosted model gets a function of its own, under a name of its own: the function knows the ranks. There is no such
name in transformers' mask interface: who sees whom comes to the function as `masks` has it, a tensor of four dims that
transformers hands on as it is.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from .register import OWN
from .ulysses import AttentionFunction

_numbers = itertools.count()
FORMS = ("sdpa", "eager", "flash")
_MODEL = "_shardwright_attention_of"
_LIKE_SDPA = tuple(f"{OWN}{kernel}" for kernel in ("cudnn", "fa", "efficient", "math", "sinks"))


def attention_of(model: nn.Module) -> str:
    """The name of the function that `model` calls now."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None))


def form_of(name: str) -> str | None:
    """The form of mask that the function of this name takes; None where that is not known."""
    if name.startswith(_LIKE_SDPA):
        return "sdpa"
    return "flash" if name.startswith("flash_attention") else name if name in FORMS else None


def native_function(name: str) -> Callable[[nn.Module], AttentionFunction]:
    """Finds the function of this name for a module; "eager" is one that stands beside the module's class. A module that
    goes around the interface (`shardformer.attention_routes`) has its own.
    """

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # late: it takes seconds, and few need it

    def find(module: nn.Module) -> AttentionFunction:
        own: AttentionFunction | None = getattr(type(module), "own_attention", None)
        if own is not None:
            return own
        if name != "eager":
            return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
        for cls in type(module).__mro__:
            function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
            if function is not None:
                return function  # type: ignore[no-any-return]
        raise ValueError(f"{type(module).__name__} computes its eager attention by itself")

    return find


def function_called(module: nn.Module, config: Any) -> AttentionFunction:
    """What the config names, for a module that has its own."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = config._attn_implementation
    if name.startswith(OWN) and form_of(name) is None:
        return ALL_ATTENTION_FUNCTIONS[name]  # type: ignore[no-any-return]
    own: AttentionFunction = type(module).own_attention  # type: ignore[attr-defined]
    return own


def use_attention(
    model: Any, function: AttentionFunction, purpose: str, copies: Sequence[Any] = (), masks_of: str | None = None
) -> None:
    """Let all attention of `model` go through `function`; its `copies` without data are asked for shapes alone.

    masks_of    the function whose masks the model makes; None: it makes none
    """
    own = WeakSet(model.modules())
    number = next(_numbers)
    for module in own:  # what a graph can look at
        setattr(module, _MODEL, number)

    def of_model(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            is_own = getattr(module, _MODEL, None) == number
        elif query.is_meta:  # whoever asks for shapes asks no other rank
            samples, heads, length, _ = query.shape
            return query.new_empty(samples, length, heads, value.shape[-1]), None
        else:
            is_own = module in own
        if not is_own:
            raise ValueError(
                f"a {type(module).__name__} of another model than the boosted one shares its config, which now names "
                "attention on parts of sequences; build it from a copy of the config that was taken before "
                "booster.boost"
            )
        return function(module, query, key, value, *args, **options)

    name_attention(of_model, purpose, (model, *copies), masks_of)


def name_attention(
    function: AttentionFunction, purpose: str, models: Sequence[Any], masks_of: str | None = None
) -> None:
    """Let all attention of `models` go through `function`, whoever calls them; `masks_of` as above."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"{OWN}{purpose}_{next(_numbers)}"
    AttentionInterface.register(name, function)
    if masks_of is not None:
        AttentionMaskInterface.register(name, AttentionMaskInterface()[masks_of])
    for module in itertools.chain(*(each.modules() for each in models)):
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name
