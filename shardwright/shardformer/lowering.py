"""Policies that replace children class by class, brought to the same decisions as plans.

`module_policy` says for a class of modules which children become which layers. A layer of `shardformer.layer` stands
for a style, so every child is a rule under its full name, which joins the rules of the policy's plan and overrides them
where both name a module: ties, regions, dropout and the vocabulary's loss are seen to once, for all policies. What else
a description says (attributes, parameters, methods) is done to the modules once they are sharded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn

from .layer.embedding import Embedding1D, VocabParallelEmbedding1D, VocabParallelLMHead1D
from .layer.linear import FusedLinear1D_Col, FusedLinear1D_Row, Linear1D_Col, Linear1D_Row
from .layer.parallel_module import native_class
from .policies.base import ModulePolicyDescription, SubModuleReplacementDescription
from .splits import EVEN, Packed, Split
from .styles import Column, HiddenEmbedding, Replaced, Row, Style, VocabEmbedding, VocabHead

Descriptions = Mapping[type[nn.Module] | str, ModulePolicyDescription]


def _column(split: Split | None = None, gather_output: bool = False) -> Style:
    return Column(split or EVEN, gather_output)


def _row(split: Split | None = None, parallel_input: bool = True) -> Style:
    return Row(split or EVEN, split_input=not parallel_input)


def _fused_column(split_sizes: list[int], gather_output: bool = False) -> Style:
    return Column(Packed(tuple(split_sizes)), gather_output)


def _fused_row(split_sizes: list[int], parallel_input: bool = True) -> Style:
    return Row(Packed(tuple(split_sizes)), split_input=not parallel_input)


def _vocab_embedding(make_vocab_size_divisible_by: int = 64) -> Style:
    return VocabEmbedding(make_vocab_size_divisible_by)


def _vocab_head(gather_output: bool = False, make_vocab_size_divisible_by: int = 64) -> Style:
    return VocabHead(make_vocab_size_divisible_by, gather_output)


def _hidden_embedding(split: Split | None = None, gather_output: bool = True) -> Style:
    return HiddenEmbedding(split or EVEN, gather_output)


# Layer -> its style from the arguments of `from_native_module`. Other layers are asked to replace the module themselves
# (`Replaced`).
_STYLES: dict[Any, Callable[..., Style]] = {
    Linear1D_Col: _column,
    Linear1D_Row: _row,
    FusedLinear1D_Col: _fused_column,
    FusedLinear1D_Row: _fused_row,
    VocabParallelEmbedding1D: _vocab_embedding,
    VocabParallelLMHead1D: _vocab_head,
    Embedding1D: _hidden_embedding,
}


@dataclass
class Lowered:
    """What `module_policy` comes to.

    rules       full name of a module -> style; of the styles those of the vocabulary and of linears shard
    changes     (module, description) of what else is changed, in the order of the descriptions
    """

    rules: dict[str, Style] = field(default_factory=dict)
    changes: list[tuple[nn.Module, ModulePolicyDescription]] = field(default_factory=list)

    @property
    def replacing(self) -> dict[str, Style]:
        """The rules that matter on one rank too: layers of the user's own, and those that only compute in another
        way.
        """
        return {
            name: style
            for name, style in self.rules.items()
            if isinstance(style, Replaced) and style.role in (None, "unknown")
        }

    def change(self) -> None:
        """Attributes, parameters and methods."""
        for module, description in self.changes:
            _change(module, description)


def lower(model: nn.Module, descriptions: Descriptions, source: str) -> Lowered:
    """Rules and changes for `model`, which is left as it is; ValueError for what does not fit it."""
    matches: dict[type[nn.Module] | str, list[tuple[str, nn.Module]]] = {key: [] for key in descriptions}
    for name, module in model.named_modules():
        for key, found in matches.items():
            if native_class(module) is key or native_class(module).__name__ == key:
                found.append((name, module))
    lowered = Lowered()
    for key, found in matches.items():
        if not found:
            shown = key if isinstance(key, str) else key.__name__
            raise ValueError(
                f"{source}.module_policy describes {shown}, but {type(model).__name__} has no such module; remove it"
            )
        for name, module in found:
            for child in descriptions[key].sub_module_replacement:
                suffix = _suffix(name, module, child, source)
                if suffix is not None:
                    full_name = f"{name}.{suffix}".removeprefix(".")
                    lowered.rules[full_name] = _style(full_name, module.get_submodule(suffix), child, source)
            lowered.changes.append((module, descriptions[key]))
    return lowered


def _suffix(name: str, module: nn.Module, child: SubModuleReplacementDescription, source: str) -> str | None:
    """The child's name below `module`, if it is there or must be."""
    suffix = re.sub(r"\[(\d+)\]", r".\1", child.suffix)
    try:
        module.get_submodule(suffix)
    except AttributeError:
        if child.ignore_if_not_exist:
            return None
        raise ValueError(
            f"{source}: {name or type(module).__name__} has no sub-module {child.suffix!r}; "
            "correct the suffix or set ignore_if_not_exist=True"
        ) from None
    return suffix


def _style(name: str, native: nn.Module, child: SubModuleReplacementDescription, source: str) -> Style:
    target, kwargs = child.target_module, child.kwargs
    if not hasattr(target, "from_native_module"):
        raise ValueError(
            f"{source}: target_module {target!r} of {child.suffix!r} has no from_native_module; use a layer of "
            "shardformer.layer"
        )
    if target not in _STYLES:
        return Replaced(target, kwargs)
    try:
        return _STYLES[target](**kwargs)
    except TypeError as error:
        raise ValueError(
            f"{source}: {name} ({type(native).__name__}): {target.__name__}.from_native_module: {error}"
        ) from None


def _change(module: nn.Module, description: ModulePolicyDescription) -> None:
    for attribute, value in description.attribute_replacement.items():
        owner, _, last = attribute.rpartition(".")
        holder: Any = module
        for part in owner.split(".") if owner else ():
            holder = getattr(holder, part)
        setattr(holder, last, value)
    for replace in description.param_replacement:
        replace(module)
    if description.method_replacement:
        # On a subclass rather than on the instance: activation checkpointing and `super()` go through the class.
        native = type(module)
        methods = {
            **description.method_replacement,
            "__module__": native.__module__,
            "native_class": native_class(module),
        }
        module.__class__ = type(native.__name__, (native,), methods)
