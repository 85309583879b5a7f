"""Tied parameters: one object in several modules, which has one layout in all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn as nn

from ..spec import ParamSpec
from .layer.linear import join_name
from .styles import Decision, Replaced


def check_ties(model: nn.Module, decisions: Sequence[Decision], source: str) -> None:
    """ValueError where rules lay one parameter out in two ways, or shard it in one of its modules alone."""
    layouts = _layouts(decisions, source)
    parts = {key: (decision, spec.name) for key, (decision, spec) in layouts.items() if spec.is_sharded or spec.partial}
    decided = {place for decision in decisions for place in _places(decision)}
    for decision in decisions:
        if isinstance(decision.style, Replaced) and decision.style.is_sharding:
            for local, param in decision.site.module.named_parameters(recurse=False):
                parts.setdefault(id(param), (decision, join_name(decision.site.name, local)))
    for owner_name, owner in model.named_modules():
        for local, param in owner.named_parameters(recurse=False):
            if id(param) in parts and (id(owner), local) not in decided:
                decision, name = parts[id(param)]
                if decision.site.name.startswith(f"{owner_name}."):  # keeps it under a second name: BERT's head
                    continue
                raise ValueError(
                    f"{name} and {join_name(owner_name, local)} are one parameter (tied), but rule {decision.rule!r} "
                    f"of {source} is for the first alone, and {type(owner).__name__} would take this rank's part for "
                    "the whole; give the second a rule with the same layout, or build the model with untied weights"
                )


def _layouts(decisions: Sequence[Decision], source: str) -> dict[int, tuple[Decision, ParamSpec]]:
    """Layout of every parameter that a rule decides on, by the id of the parameter."""
    layouts: dict[int, tuple[Decision, ParamSpec]] = {}
    for decision in decisions:
        for name, spec in decision.specs.items():
            param = decision.site.module.get_parameter(name)
            other, known = layouts.setdefault(id(param), (decision, spec))
            if (known.dim, known.pieces, known.partial) != (spec.dim, spec.pieces, spec.partial):
                raise ValueError(
                    f"{known.name} and {spec.name} are one parameter (tied), but rules {other.rule!r} and "
                    f"{decision.rule!r} of {source} lay it out differently; give both the same layout"
                )
    return layouts


def _places(decision: Decision) -> list[tuple[int, str]]:
    """Modules, by id, and names of the parameters in them that a rule decides on."""
    module = decision.site.module
    if isinstance(decision.style, Replaced):  # the layer decides when it is made
        return [(id(module), name) for name, _ in module.named_parameters(recurse=False)]
    owners = [name.rpartition(".") for name in decision.specs]
    return [(id(module.get_submodule(owner)), local) for owner, _, local in owners]
