"""Policies that replace children class by class, brought to the same decisions as plans.

`module_policy` says for a class of modules which children become which layers. A layer of `shardformer.layer` stands
for a style, so every child is a rule under its full name, which joins the rules of the policy's plan and overrides them
where both name a module: ties, regions, dropout and the vocabulary's loss are seen to once, for all policies. What else
a description says (first attributes, then parameters, then methods) is done to the modules while they are whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch.nn as nn

from ..models.config import KEY_VALUE_HEADS, QUERY_HEADS, first_int
from .layer.conv1d import GPT2FusedLinearConv1D_Col, GPT2FusedLinearConv1D_Row
from .layer.embedding import Embedding1D, VocabParallelEmbedding1D, VocabParallelLMHead1D
from .layer.linear import (
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    Linear1D_Col,
    Linear1D_Row,
    is_linear,
    output_size,
    parts_of_sizes,
)
from .layer.parallel_module import native_class, with_methods
from .policies.descriptions import ModulePolicyDescription, SubModuleReplacementDescription
from .splits import EVEN, Packed, Split
from .styles import Column, HiddenEmbedding, Replaced, Row, Style, VocabEmbedding, VocabHead

# Under which attentions keep how many features a head has.
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
_LOGGER = logging.getLogger(__name__)
Descriptions = Mapping[type[nn.Module] | str, ModulePolicyDescription]


def _column(split: Split | None = None, gather_output: bool = False) -> Style:
    return Column(split or EVEN, gather_output)


def _row(split: Split | None = None, parallel_input: bool = True) -> Style:
    return Row(split or EVEN, split_input=not parallel_input)


def _fused_column(split_sizes: list[int], gather_output: bool = False) -> Style:
    return Column(parts_of_sizes(split_sizes), gather_output)


def _fused_row(split_sizes: list[int], parallel_input: bool = True) -> Style:
    return Row(parts_of_sizes(split_sizes), split_input=not parallel_input)


def _conv_row(parallel_input: bool = True) -> Style:
    return Row(EVEN, split_input=not parallel_input)


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
    GPT2FusedLinearConv1D_Col: _fused_column,
    GPT2FusedLinearConv1D_Row: _conv_row,
    VocabParallelEmbedding1D: _vocab_embedding,
    VocabParallelLMHead1D: _vocab_head,
    Embedding1D: _hidden_embedding,
}


@dataclass
class Lowered:
    """What `module_policy` comes to.

    rules       full name of a module -> style; of the styles those of the vocabulary and of linears shard
    changes     (module, description) of what else is changed, in the order of the descriptions
    source      the policy
    """

    rules: dict[str, Style] = field(default_factory=dict)
    changes: list[tuple[nn.Module, ModulePolicyDescription]] = field(default_factory=list)
    source: str = ""

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

    @property
    def changes_parameters(self) -> bool:
        return any(description.param_replacement for _, description in self.changes)

    def change(self) -> None:
        """Attributes, parameters and methods, module after module."""
        for module, description in self.changes:
            for attribute, value in description.attribute_replacement.items():
                _set(module, attribute, value)
            for replace in description.param_replacement:
                try:
                    replace(module)
                except Exception as error:
                    raise ValueError(
                        f"{self.source}.module_policy, {native_class(module).__name__}: param_replacement "
                        f"{getattr(replace, '__name__', replace)} raised {type(error).__name__}: {error}"
                    ) from error
            if description.method_replacement:
                with_methods(module, description.method_replacement)

    def attributes_of(self, holders: Container[int]) -> list[tuple[Any, str, Any]]:
        """(module, name, value) of the attributes that change in the modules with these ids, as they are now."""
        found = []
        for module, description in self.changes:
            for attribute in description.attribute_replacement:
                holder, last = _holder(module, attribute)
                if id(holder) in holders and hasattr(holder, last):
                    found.append((holder, last, getattr(holder, last)))
        return found


def lower(model: nn.Module, descriptions: Descriptions, source: str, ranks: int = 1) -> Lowered:
    """Rules and changes for `model`, which is left as it is; ValueError for what does not fit it, or its heads those
    that shard it.
    """
    matches: dict[type[nn.Module] | str, list[tuple[str, nn.Module]]] = {key: [] for key in descriptions}
    for name, module in model.named_modules():
        for key, found in matches.items():
            if native_class(module) is key or native_class(module).__name__ == key:
                found.append((name, module))
    nothing = [key if isinstance(key, str) else key.__name__ for key, found in matches.items() if not found]
    if nothing and len(nothing) == len(matches):
        raise ValueError(
            f"{source}.module_policy describes {', '.join(nothing)}, but {type(model).__name__} has no such module; "
            f"its modules are {_classes_in(model)}"
        )
    if nothing:
        _LOGGER.info(f"{source}.module_policy: {type(model).__name__} has no {', '.join(nothing)}")
    lowered = Lowered(source=source)
    for key, found in matches.items():
        _check_attributes([module for _, module in found], descriptions[key], source)
        for name, module in found:
            for child in descriptions[key].sub_module_replacement:
                suffix = _suffix(name, module, child, source)
                if suffix is not None:
                    full_name = f"{name}.{suffix}".removeprefix(".")
                    lowered.rules[full_name] = _style(full_name, module.get_submodule(suffix), child, source)
            lowered.changes.append((module, descriptions[key]))
    _check_heads(model, lowered, ranks)
    return lowered


def _check_heads(model: nn.Module, lowered: Lowered, ranks: int) -> None:
    """ValueError for linears of an attention whose features are dealt evenly, though its heads are not: no forward
    computes with a part of a head.
    """
    rewritten = {id(module) for module, description in lowered.changes if "forward" in description.method_replacement}
    for name, style in lowered.rules.items():
        attention = model.get_submodule(name.rpartition(".")[0])
        features = first_int(attention, _HEAD_SIZES)
        if not isinstance(style, Column) or style.gather_output or features is None or id(attention) in rewritten:
            continue
        packed = isinstance(style.split, Packed) and isinstance(style.split.parts, tuple)
        linear = model.get_submodule(name)
        parts = cast(Packed, style.split).parts if packed else (output_size(linear),) if is_linear(linear) else ()
        holders = (attention, getattr(attention, "config", None))
        counts = [first_int(holder, kind) for holder in holders for kind in (QUERY_HEADS, KEY_VALUE_HEADS)]
        for part in cast(tuple[int, ...], parts):
            heads, rest = divmod(part, features)
            if not rest and heads in counts and heads % ranks:
                raise ValueError(
                    f"{lowered.source}.module_policy: {name} ({native_class(linear).__name__}) has {heads} heads of "
                    f"{features} features, which tp={ranks} does not divide: a rank would get a part of a head. "
                    "Use a tp that divides them, or name it in the policy's rules() with 'query_heads', "
                    "'key_value_heads' and 'output_heads', which deal whole heads, any number of them"
                )


def _classes_in(model: nn.Module) -> str:
    """The model's own ones, without those of torch."""
    classes = dict.fromkeys(native_class(module) for module in model.modules())
    return ", ".join(cls.__name__ for cls in classes if not cls.__module__.startswith("torch."))


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
    if target not in _STYLES:
        return Replaced(target, kwargs)
    try:
        return _STYLES[target](**kwargs)
    except TypeError as error:
        raise ValueError(
            f"{source}: {name} ({type(native).__name__}): {target.__name__}.from_native_module: {error}"
        ) from None


def _check_attributes(modules: Sequence[nn.Module], description: ModulePolicyDescription, source: str) -> None:
    """Warn of attributes that none of the modules of a class has, as nothing may read them. Those of parts that only
    some models have, such as cross attention, nobody misses.
    """
    for attribute in description.attribute_replacement:
        holders = [_holder(module, attribute) for module in modules]
        there = [(holder, last) for holder, last in holders if holder is not None]
        if there and not any(hasattr(holder, last) for holder, last in there):
            _LOGGER.warning(
                f"{source}: attribute_replacement {attribute!r} of {native_class(modules[0]).__name__}: "
                f"{type(there[0][0]).__name__} has no {there[0][1]!r} to be replaced, so nothing of its own reads it"
            )


def _holder(module: nn.Module, attribute: str) -> tuple[Any, str]:
    """What holds an attribute with a dotted name, None where there is no such thing, and its last name."""
    holder: Any = module
    *parts, last = re.sub(r"\[(\d+)\]", r".\1", attribute).split(".")
    for part in parts:
        holder = getattr(holder, part, None)
    return holder, last


def _set(module: nn.Module, attribute: str, value: Any) -> None:
    holder, last = _holder(module, attribute)
    if holder is not None:
        setattr(holder, last, value)
