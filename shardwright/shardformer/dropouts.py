"""Which numbers the dropout layers of a policy draw.

A policy that puts `DropoutForParallelInput` somewhere need not mean that activations are sharded there: policies of
other frameworks have it behind row linears and embeddings too, where masks that differ over the ranks would make the
ranks drift apart. The regions of the model know, so the layer draws what regions have it draw at its place. A region
ends with its module; where a dropout sits between one that opens and another one that closes, both are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch.nn as nn

from .layer.dropout import DropoutForParallelInput
from .regions import Region, ends, is_within, list_element
from .styles import Decision, Replaced


def regions_for_dropout(
    model: nn.Module, decisions: Sequence[Decision], regions: Sequence[Region], source: str
) -> list[Region]:
    """The regions in which ranks draw numbers of their own; ValueError where nobody knows whether a dropout that the
    policy names is in one.
    """
    dropouts = [decision.site.name for decision in decisions if _is_parallel_dropout(decision)]
    unknown = [decision for decision in decisions if decision.style.role == "unknown"]
    for name in dropouts:
        _require_known(model, name, unknown, regions, source)
    joined = list(regions)
    for region, around in ends(model, regions, decisions):
        if around in (None, region.name) or not any(is_within(name, around) for name in dropouts):
            continue
        closes = [module for other in regions if is_within(other.name, around) for module in other.closes]
        joined[joined.index(region)] = replace(
            region, name=around, module=model.get_submodule(around), closes=tuple(closes)
        )
    return joined


def _is_parallel_dropout(decision: Decision) -> bool:
    style = decision.style
    return (
        isinstance(style, Replaced)
        and isinstance(style.target, type)
        and issubclass(style.target, DropoutForParallelInput)
    )


def _require_known(
    model: nn.Module, name: str, unknown: Sequence[Decision], regions: Sequence[Region], source: str
) -> None:
    """Refuse a dropout near a layer of the user's own, of which nobody knows whether its output is sharded."""
    for decision in unknown:
        layer = decision.site.name
        if not is_within(name, list_element(model, layer)):
            continue
        around = [region.name for region in regions if region.opens and region.closes and is_within(name, region.name)]
        if any(not is_within(layer, region) for region in around):
            continue  # what opens there closes there
        raise ValueError(
            f"{source}: {name} is to be a DropoutForParallelInput, but it is not known whether its input is sharded: "
            f"{layer} near by becomes a layer of your own, {getattr(decision.style, 'target', None)!r}. Derive that "
            "layer from Linear1D_Col or Linear1D_Row if it opens or closes a sharded part; use "
            "DropoutForReplicatedInput where the input is whole"
        )
