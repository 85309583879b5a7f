"""Rules of several regions as one plan, and what a search for rules has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

import torch.nn as nn

from .attention import LocalHeads
from .hf_plan import Proposal
from .layer.linear import is_linear
from .patterns import patterns_of
from .rules import Rules

_SHOWN = 6  # reasons


@dataclass
class Findings:
    """What was found out about a class of models.

    rules       the rules that passed
    dropped     regions that stay whole, because no way to shard them was found
    checked     whether the rules were tried on a small copy
    left        linears that hold much and stay whole, each with the reason, as far as it is known
    """

    rules: Rules = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    checked: bool = False
    left: dict[str, str] = field(default_factory=dict)

    @property
    def reasons(self) -> str:
        """Those of linears that stay whole."""
        return "; ".join(f"{name}: {why}" for name, why in list(self.left.items())[:_SHOWN])

    @property
    def why_none(self) -> str:
        """Why no rules were found."""
        why = "there is no plan for it in transformers, and no attention and MLPs are recognised"
        if self.dropped:
            why = f"what its plan and names suggest ({', '.join(self.dropped)}) does not give its gradients"
        return f"{why}; {self.reasons}" if self.left else why

    def notes(self) -> tuple[str, ...]:
        """What a layout report says about how the model is sharded."""
        notes = []
        if not self.checked:
            notes.append(
                "the tensor-parallel plan follows from transformers' plan and from names; it was not tried on a small "
                "copy here"
            )
        if self.left:
            notes.append(f"stay whole on every tensor-parallel rank: {self.reasons}")
        return tuple(notes)


def claimed_first(regions: list[Proposal]) -> list[Proposal]:
    """The regions whose modules another one knows of too (an MLP that makes the biases of an attention) before those,
    whose rules count where they are joined.
    """

    def claimed(region: Proposal) -> bool:
        named = set(chain.from_iterable(region.alternatives))
        return any(named < set(chain.from_iterable(other.alternatives)) for other in regions if other is not region)

    return sorted(regions, key=claimed, reverse=True)


def joined(rules: Iterable[Rules]) -> Rules:
    found: Rules = {}
    for some in rules:
        found |= some
    return found


def guess(model: nn.Module, name: str, rules: Rules) -> str:
    """Norms and scales inside attention or MLP meet sharded activations, linears that no rule names meet whole ones."""
    owner_name = name.rpartition(".")[0]
    owner = model.get_submodule(owner_name)
    if is_linear(owner) or model.get_parameter(name).ndim > 1 or "_a_" in owner_name.rpartition(".")[2]:
        return "replicated"
    around = patterns_of(model, owner_name) | patterns_of(model, owner_name.rpartition(".")[0])
    in_attention = any(isinstance(rules.get(pattern), LocalHeads) for pattern in around)
    return "partial_gradient" if in_attention or "act" in owner_name.rpartition(".")[2] else "replicated"
