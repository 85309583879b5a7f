"""Which attention the parts of a model are given: found before anything is touched, set when the model is sharded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..attention.choice import Choice, choose
from ..attention.installed import find_installed
from ..attention.model_needs import Part, find_parts, needs_of, taken_by
from ..attention.needs import Needs
from ..attention.register import guard, implementation_of, is_foreign, register_attention, set_implementation
from ..logging import get_dist_logger
from ..models.config import text_config
from ..utils.device import get_current_device
from .attention_methods import has_methods, reads_config, use_methods
from .config import ShardConfig, ShardingOptions
from .layer.parallel_module import native_class


@dataclass(frozen=True)
class Pick:
    """What one part of a model is given.

    name    of the implementation, in transformers' words
    had     what the part was built with
    """

    part: Part
    needs: Needs
    choice: Choice
    name: str
    had: str | None

    @property
    def is_fused(self) -> bool:
        return self.name != "eager"

    def __str__(self) -> str:
        whose = f"{self.part.name}: " if self.part.name else ""
        return f"{whose}attention {self.choice.backend}" + " (which it had by itself)" * (self.name == self.had)


def pick_attention(model: nn.Module, options: ShardingOptions, dtype: torch.dtype | None = None) -> list[Pick]:
    """One pick per part that has attention; none where the options leave attention alone. ValueError where they cannot
    be honoured. Nothing is communicated and nothing changed.

    dtype   that attention will compute in; None takes that of the weights
    """
    asked = options.attention_backend
    if asked is None and not options.enable_flash_attention and not options.enable_all_optimization:
        return []
    what = f"attention_backend={asked!r}" if asked is not None else "enable_flash_attention=True"
    parts = find_parts(model)
    if not parts:
        if asked is None and not options.enable_flash_attention:
            return []
        raise ValueError(f"{what}: {_name(model)} has no attention of transformers; use {_nothing(asked)}")
    main = _main(model, parts)
    picks = []
    for part in parts:
        had = getattr(part.config, "_attn_implementation", None)
        chosen = had not in (None, "eager", "sdpa")
        if asked is None and chosen and (not options.enable_flash_attention or is_foreign(had)):
            continue  # kernels that were chosen for it already
        picks.append(_pick(part, part is main, options, dtype, had))
    if options.enable_flash_attention and asked is None and picks and not any(pick.is_fused for pick in picks):
        raise ValueError(
            f"{what}: {_name(model)} can have no fused attention here ({picks[0].choice.reason}); use "
            "enable_flash_attention=False"
        )
    return picks


def _pick(part: Part, is_main: bool, options: ShardingOptions, dtype: torch.dtype | None, had: str | None) -> Pick:
    takes = taken_by(part)
    if has_methods(part.attention):
        takes |= {"sdpa", "eager"}
    needs = needs_of(part, get_current_device(), dtype or _dtype(part.model), takes, options.example_inputs)
    asked = options.attention_backend
    try:
        choice = choose(needs, find_installed(), asked)
    except ValueError as error:
        if is_main:
            raise ValueError(f"{_name(part.model)}: {error}") from None
        choice = choose(needs, find_installed())  # a tower beside it takes its own best
    return Pick(part, needs, choice, implementation_of(choice, needs), had)


def use_attention(model: nn.Module, picks: Sequence[Pick]) -> None:
    """Give every part what was picked for it, and say so once. Before modules are sharded: methods are replaced in
    their own classes.
    """
    if not picks:
        return
    register_attention()
    picks = _with_own_configs(model, picks)
    for pick in picks:
        guard(pick.part, pick.name)
        if not has_methods(pick.part.attention):
            set_implementation(pick.part, pick.name)
        elif reads_config(pick.part.attention):
            pick.part.config._attn_implementation_internal = pick.name
        elif pick.is_fused:
            use_methods(pick.part.attention)
    _tell_those_without(model, picks)
    get_dist_logger().info(describe(picks), ranks=[0])


def _with_own_configs(model: nn.Module, picks: Sequence[Pick]) -> list[Pick]:
    """Give the model configs of its own where an implementation will change: other models may have been built of the
    same, and would change with it.
    """
    if all(pick.name == pick.had for pick in picks):
        return list(picks)
    copies: dict[int, Any] = {}  # also of the configs within
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if hasattr(value, "_attn_implementation_internal"):
                setattr(module, name, copy.deepcopy(value, copies))
    return [replace(pick, part=replace(pick.part, config=pick.part.model.config)) for pick in picks]


def _tell_those_without(model: nn.Module, picks: Sequence[Pick]) -> None:
    """A model around the parts, without attention of its own, may make their masks: it goes by the text's."""
    main = _main(model, [pick.part for pick in picks])
    pick = next(pick for pick in picks if pick.part is main)
    known = {id(part.config) for part in find_parts(model)}
    if has_methods(main.attention):
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(module, "set_attn_implementation") and id(config) not in known:
            config._attn_implementation_internal = pick.name


def names_of(picks: Sequence[Pick]) -> str:
    """What all ranks must have picked alike."""
    return ", ".join(f"{pick.part.name or 'model'}: {pick.name}" for pick in picks)


def describe(picks: Sequence[Pick]) -> str:
    return "; ".join(f"{pick}: {pick.choice.reason}" for pick in picks)


def explain(model: nn.Module, options: ShardingOptions, dtype: torch.dtype | None = None) -> str:
    """What the attention of a model is given on this machine, or what enable_flash_attention=True would give it."""
    picks = pick_attention(model, options, dtype)
    if picks:
        return describe(picks)
    try:
        picks = pick_attention(model, ShardConfig(enable_flash_attention=True), dtype)
    except ValueError as error:
        return f"attention stays as it was built ({error})"
    return f"attention stays as it was built; enable_flash_attention=True would give it {describe(picks)}"


def require_same_attention(picks: Sequence[Pick], group: dist.ProcessGroup) -> None:
    """ValueError on all ranks of `group` where they picked differently. Collective."""
    if group.size() == 1 or dist.get_backend(group) == "fake":
        return
    found = [("", "")] * group.size()
    dist.all_gather_object(found, (names_of(picks), describe(picks)), group=group)
    for rank, (names, other) in enumerate(found):
        if names != found[0][0]:
            ranks = dist.get_process_group_ranks(group)
            raise ValueError(
                f"ranks that share one model would compute its attention in different ways: {found[0][1]} on rank "
                f"{ranks[0]} and {other} on rank {ranks[rank]}. Install the same packages on all machines, or name one "
                "that all of them have: attention_backend='sdpa'"
            )


def _main(model: nn.Module, parts: Sequence[Part]) -> Part:
    """The part that a request is about: that of the text, or the first."""
    text = text_config(model)
    return next((part for part in parts if part.config is text), parts[0])


def _dtype(model: nn.Module) -> torch.dtype:
    return next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float32)


def _nothing(asked: str | None) -> str:
    return "enable_flash_attention=False" if asked is None else "None"


def _name(module: nn.Module) -> str:
    return str(native_class(module).__name__)
