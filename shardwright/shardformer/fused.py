"""Which operators of a model are computed in one, by what the options ask for (docs/fused.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch.nn as nn

from ..kernels.backends import source
from .config import ShardingOptions
from .layer.activation import fuse_activations, has_gated_activations
from .layer.norm import fuse_norms, has_fusable_norms
from .layer.rotary import fuse_rotary, has_rotary

_LOGGER = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """A kind of operators.

    option      that asks for it
    words       what it is, for reports
    liger       which function of liger-kernel's it would take
    exist       whether a model has any that gain by it
    why_not     what is so where it has none
    """

    option: str
    words: str
    liger: str
    exist: Callable[[nn.Module], bool]
    why_not: str


NORMS = _Kind(
    "enable_fused_normalization", "norms", "rms_norm", has_fusable_norms, "are one kernel each already, and stay"
)
_BEFORE_SHARDING = (
    _Kind(
        "enable_fused_activation",
        "gated activations",
        "swiglu",
        has_gated_activations,
        "are none: no MLP multiplies SiLU or GELU of one projection with another",
    ),
    _Kind(
        "enable_fused_rotary",
        "rotary positions",
        "",
        has_rotary,
        "are none, or of no form that is known here",
    ),
)
KINDS = (NORMS, *_BEFORE_SHARDING)
_FUSE = {"enable_fused_activation": fuse_activations, "enable_fused_rotary": fuse_rotary}


def fused_operators(options: ShardingOptions) -> list[_Kind]:
    return [kind for kind in KINDS if getattr(options, kind.option) or options.enable_all_optimization]


def words_of(model: nn.Module, options: ShardingOptions) -> list[str]:
    """What will be computed in one, and by whose kernels."""
    return [f"{kind.words} fused ({source(kind.liger)})" for kind in fused_operators(options) if kind.exist(model)]


def reasons_against(model: nn.Module) -> list[str]:
    """What all optimizations together leave as it is."""
    found = [f"{kind.words} ({kind.why_not})" for kind in KINDS if not kind.exist(model)]
    return [*found, "compiled layers (enable_jit_fused=True; compiling takes its time when training starts)"]


def tell_of_none(model: nn.Module, options: ShardingOptions) -> None:
    """Warn of options that were given by name, and find nothing in this model."""
    for kind in KINDS:
        if getattr(options, kind.option) and not options.enable_all_optimization and not kind.exist(model):
            _LOGGER.warning(f"{kind.option}=True: the {kind.words} of {type(model).__name__} {kind.why_not}")


def fuse_before_sharding(model: nn.Module, options: ShardingOptions) -> None:
    """While modules have their own classes, which sharding puts its own in front of."""
    for kind in fused_operators(options):
        if kind in _BEFORE_SHARDING:
            _FUSE[kind.option](model)


def fuse_after_sharding(model: nn.Module, options: ShardingOptions) -> None:
    if NORMS in fused_operators(options):
        fuse_norms(model)
