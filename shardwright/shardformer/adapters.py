"""LoRA adapters of peft on layers that a plan shards.

peft puts a wrapper in the place of a linear W [O, I]: `base_layer` (W), `lora_A` [r, I] and `lora_B` [O, r], one pair
per adapter. It computes y = W x + s B A x. A rule that names the linear is applied to the parts, so that every rank
computes its share of the sum:

    column   W and B by their outputs, A whole   y_local = W_local x + s B_local (A x)
    row      W and A by their inputs, B whole    y = sum(W_local x_local) + s B sum(A_local x_local)

    latent   W and B make features of which the last ones meet the rank's heads; all whole

Under a column linear B sums the gradient of A x, so that of A is whole.

Dropout in front of A sees what A sees: the same on all ranks for a column linear, each rank's own part for a row
linear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch.nn as nn

from ..models.config import native_model as native_model
from .layer.dropout import DropoutForParallelInput, DropoutForReplicatedInput
from .layer.parallel_module import ParallelGroup, native_class
from .styles import Column, Custom, LatentKeyValue, PartialGradient, Replicated, Row, Site, Style


def has_adapters(module: nn.Module) -> bool:
    """Whether `module` is peft's wrapper of a layer."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and isinstance(
        getattr(module, "base_layer", None), nn.Module
    )


def refuse_prompts(model: nn.Module, option: str) -> None:
    """ValueError for peft's prompts and prefixes, which are tokens that come before each sequence."""
    for config in dict(getattr(model, "peft_config", {})).values():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"{option} with {type(config).__name__}: its virtual tokens would stand before every part of a "
                "sequence; use LoRA, or leave sequences whole (enable_sequence_parallelism=False)"
            )


def refuse_prefixes(model: nn.Module) -> None:
    """ValueError for peft's prefixes, which are keys and values of all heads, with tensor parallelism."""
    for config in dict(getattr(model, "peft_config", {})).values():
        if getattr(config, "peft_type", None) == "PREFIX_TUNING":
            raise ValueError(
                f"tp_size above 1 with {type(config).__name__}: prefixes are keys and values of all heads, of which a "
                "rank has some; use LoRA, PromptTuningConfig, or tp_size=1"
            )


def check_adapters(model: nn.Module) -> None:
    """ValueError for adapters of a parameter itself, which peft adds to it while its module computes."""
    for name, module in model.named_modules():
        parameter = getattr(module, "parameter_name", None)
        if has_adapters(module) and isinstance(parameter, str):
            inner = name.replace(".base_layer", "")
            raise ValueError(
                f"{inner}.{parameter} ({native_class(_innermost(module)).__name__}) carries LoRA adapters, which need "
                "the whole parameter on every rank: target_parameters names it, or target_modules reaches experts, "
                "whose weights are one parameter. With tensor parallelism adapt linears, such as "
                "target_modules=['q_proj', 'o_proj'], or use tp_size=1"
            )


def wrapped_parameters(model: nn.Module) -> dict[str, str]:
    """Parameters of wrapped layers by the names that they had before peft came -> the wrapper: a rule for one means
    its adapters, too.
    """
    return {
        f"{name}.{own}": name
        for name, module in model.named_modules(remove_duplicate=False)
        if has_adapters(module)
        for own, _ in _innermost(module).named_parameters(recurse=False)
    }


def _innermost(wrapper: Any) -> nn.Module:
    while has_adapters(wrapper):
        wrapper = wrapper.base_layer
    return cast(nn.Module, wrapper)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """The model as it was before peft put wrappers in the place of its layers, for what looks at its structure."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        if not has_adapters(parent)
        for name, child in parent._modules.items()
        if child is not None and has_adapters(child)
    ]
    for parent, name, child in wrapped:
        parent._modules[name] = _innermost(child)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child


def parts_of(style: Style, site: Site) -> list[tuple[Style, Site]]:
    """`style` at `site`, or at the parts of the wrapper that is there."""
    wrapper: Any = site.module
    if site.parameter is not None or not has_adapters(wrapper) or isinstance(style, Replicated | PartialGradient):
        return [(style, site)]
    if not isinstance(style, Column | Row | LatentKeyValue):
        raise ValueError(
            f"a layer under the style {type(style).__name__} cannot carry LoRA adapters with tensor parallelism; "
            "leave it out of target_modules, or use tp_size=1"
        )
    if wrapper.lora_variant or len(wrapper.lora_magnitude_vector):
        raise ValueError(
            "variants of LoRA (DoRA and others) need the whole weight on every rank; use plain LoRA, or tp_size=1"
        )
    # Behind a row linear whose output meets sharded features, B's gradient is a part of a sum.
    behind = PartialGradient() if style.role == "inside" else Replicated()
    inner, outer = (style, behind) if isinstance(style, Row) else (Replicated(), style)

    def part(name: str, module: nn.Module) -> Site:
        return Site(f"{site.name}.{name}", module, None, site.parent, site.parallel, site.above)

    parts: list[tuple[Style, Site]] = [(style, part("base_layer", wrapper.base_layer))]
    for name in wrapper.lora_A:
        parts.append((inner, part(f"lora_A.{name}", wrapper.lora_A[name])))
        parts.append((outer, part(f"lora_B.{name}", wrapper.lora_B[name])))
    is_local = isinstance(style, Row) and not style.split_input
    parts.append((Custom(_dropout_for(is_local)), part("lora_dropout", wrapper.lora_dropout)))
    return parts


def _dropout_for(is_local: bool) -> Callable[[nn.Module, ParallelGroup], None]:
    kind = DropoutForParallelInput if is_local else DropoutForReplicatedInput

    def change(dropouts: nn.Module, parallel: ParallelGroup) -> None:
        assert isinstance(dropouts, nn.ModuleDict)
        for name, dropout in dropouts.items():
            if isinstance(dropout, nn.Dropout):
                dropouts[name] = kind.from_native_module(dropout, parallel.group)

    return change
