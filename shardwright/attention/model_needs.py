"""What the attention of a transformers model needs, read off its config, its classes and its modules.

A model may be several: towers for images and text have a config each, and with it an attention implementation each.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..models.config import HIDDEN, QUERY_HEADS, first_int, text_config
from .needs import ARBITRARY, BLOCK, CAUSAL, PADDING, WINDOW, Needs, needs_on

# Families whose only reason to do without SDPA are sinks, which `attention.backends` computes with it.
_SINKS_WITH_SDPA = ("gpt_oss",)
_OWN_DROPOUT = re.compile(r"att|^dropout(_prob|_p|_rate)?$")  # other dropouts of an attention module follow its output
_WINDOWS = ("sliding_window", "attention_chunk_size")
_OTHER_DROPOUT = re.compile(r"resid|hidden|proj|output|path")
_CROSS = re.compile(r"cross|encoder_?attn|encdec", re.IGNORECASE)
_MASK_FUNCTIONS = re.compile(r"\b(block_sequence_ids|or_mask_function|and_mask_function)=(?!None)")


@dataclass(frozen=True)
class Part:
    """A model, or one of the models in it, that has attention of its own.

    name        "" for the whole
    config      where its implementation is kept
    attention   its attention modules
    crosses     some of them attend to another sequence
    makes_masks masks that are made of functions of the model's own, such as blocks of images
    """

    name: str
    model: nn.Module
    config: Any
    attention: tuple[nn.Module, ...]
    crosses: bool = False
    makes_masks: bool = False


def find_parts(model: nn.Module) -> list[Part]:
    """The parts that have attention, outer ones first."""
    owners: dict[int, tuple[str, nn.Module]] = {}
    attention: dict[int, list[nn.Module]] = {}
    crossing: set[int] = set()
    making: set[int] = set()
    for name, module, owner in _with_owners(model):
        if owner is module:
            owners.setdefault(id(module.config), (name, module))
            if _MASK_FUNCTIONS.search(_source(type_of(module))):
                making.add(id(module.config))
        if owner is None:
            continue
        of = id(owner.config)
        if is_attention(module):
            attention.setdefault(of, []).append(module)
            if _CROSS.search(f"{name.rpartition('.')[2]} {type_of(module).__name__}"):
                crossing.add(of)
    if making - attention.keys():  # a model around the parts makes masks of the text's
        making.add(id(text_config(model)))
    return [
        Part(name, part, part.config, tuple(attention[key]), key in crossing, key in making)
        for key, (name, part) in owners.items()
        if key in attention
    ]


def is_attention(module: nn.Module) -> bool:
    """By the name of its class; transformers has no other mark."""
    return bool(re.search(r"Attention|Attn", type(module).__name__)) and next(module.children(), None) is not None


def _with_owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """(name, module, the innermost transformers model that it is in)."""

    def walk(prefix: str, module: nn.Module, owner: Any) -> Iterator[tuple[str, nn.Module, Any]]:
        if hasattr(module, "set_attn_implementation") and hasattr(module, "config"):
            owner = module
        yield prefix, module, owner
        for name, child in module.named_children():
            yield from walk(f"{prefix}.{name}" if prefix else name, child, owner)

    yield from walk("", model, None)


def needs_of(part: Part, device: torch.device, dtype: torch.dtype, takes: frozenset[str], batch: Any = None) -> Needs:
    """`batch`: a batch like the real ones, for what only data tells; None where there is none."""
    found = needs_on(device)
    masks = {PADDING} | ({CAUSAL} if any(getattr(each, "is_causal", False) for each in part.attention) else set())
    if _has_windows(part):
        masks.add(WINDOW)
    given = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    given = tuple(given.values()) if isinstance(given, Mapping) else (given,)  # one for each kind of layer
    if any(isinstance(mask, torch.Tensor) and mask.ndim > 2 for mask in given):
        masks.add(ARBITRARY)
    if part.makes_masks:
        masks.add(BLOCK)
    head_dim, value_dim = _head_dims(part)
    packed, in_one_row = _packing(batch)
    return replace(
        found,
        dtype=dtype,
        head_dim=head_dim,
        value_dim=value_dim,
        masks=frozenset(masks),
        packed=packed,
        in_one_row=in_one_row,
        crossed=part.crosses,
        soft_cap=has_soft_cap(part.config),
        sinks=any(name.rpartition(".")[2] == "sinks" for name, _ in part.model.named_parameters()),
        position_bias=any("position_bias=" in _source(type_of(module).forward) for module in part.attention),
        dropout=_dropout(part),
        takes=takes,
    )


def taken_by(part: Part) -> frozenset[str]:
    """What the classes of a part say they can be given: names of transformers, "own" and "own unpadded" for functions
    of ours.
    """
    model, takes = part.model, {"eager"}
    can_be_set = getattr(model, "_can_set_attn_implementation", None)
    if can_be_set is None or not can_be_set():
        return frozenset({getattr(part.config, "_attn_implementation", None) or "eager"})  # what it was built with
    has_sinks = getattr(part.config, "model_type", None) in _SINKS_WITH_SDPA
    sdpa = bool(getattr(model, "_supports_sdpa", False)) or has_sinks
    flash = bool(getattr(model, "_supports_flash_attn", False))
    if sdpa:
        takes.add("sdpa")
    if getattr(model, "_supports_flex_attn", False):
        takes.add("flex_attention")
    names = {f"flash_attention_{generation}" for generation in (2, 3, 4)} if flash else set()
    compatible = getattr(model, "_compatible_flash_implementations", None)
    takes |= names if compatible is None else names & set(compatible)
    if not _compares_names(model):
        takes |= {"own"} if sdpa else set()
        takes |= {"own unpadded"} if flash and compatible is None else set()
    return frozenset(takes)


def _compares_names(model: nn.Module) -> bool:
    """Whether the code of a model asks for an implementation by its name, so that it would take another way with one of
    ours; to ask for "eager", which ours are not, is no harm.
    """
    source = inspect.getsource(sys.modules[type_of(model).__module__])
    asked = re.findall(r"_attn_implementation\s*(?:==|!=|in|not in)\s*(\([^)]*\)|\"[^\"]*\"|'[^']*')", source)
    return any(re.sub(r"[\"'\s]", "", each) != "eager" for each in asked)


def type_of(model: nn.Module) -> Any:
    """The class that a module was built with."""
    return getattr(type(model), "native_class", type(model))


def _source(what: Any) -> str:
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):  # a class of an interactive session
        return ""


def _head_dims(part: Part) -> tuple[int, int | None]:
    """(of queries and keys, of values where it differs)."""
    config = part.config
    found = [first_int(module, ("qk_head_dim", "head_dim", "attention_head_size")) for module in part.attention]
    heads, hidden = _said(config, QUERY_HEADS), _said(config, HIDDEN)
    said = _said(config, ("qk_head_dim", "head_dim", "d_kv"))
    head_dim = max((dim for dim in found if dim is not None), default=said)
    if head_dim is None:
        head_dim = hidden // heads if hidden and heads else 128
    values = _said(config, ("v_head_dim",))
    return head_dim, values if values != head_dim else None


def _said(config: Any, names: Sequence[str]) -> int | None:
    """What a config says for the whole model; configs whose layers differ refuse to be asked, and modules tell."""
    try:
        return first_int(config, names)
    except Exception:  # of a class that transformers has for it since 5.23
        return None


def _has_windows(part: Part) -> bool:
    kinds = getattr(part.config, "layer_types", None) or ()
    by_kind = any("sliding" in str(kind) or "chunked" in str(kind) for kind in kinds)
    if by_kind or any(first_int(module, _WINDOWS) for module in part.attention):
        return True
    used = not kinds and getattr(part.config, "use_sliding_window", True)
    return bool(used and _said(part.config, _WINDOWS))


def has_soft_cap(config: Any) -> bool:
    """Whether scores of attention are squeezed, which torch's SDPA cannot do."""
    names = [name for name in vars(config) if re.search(r"att\w*(soft_?cap|logits?_cap)", name)]
    return any(getattr(config, name) for name in names)


def _dropout(part: Part) -> float:
    """The largest probability of a dropout that is, by its name, the attention's own."""
    found = [0.0]
    for module in part.attention:
        for name, value in [*vars(module).items(), *module.named_children()]:
            p = value.p if isinstance(value, nn.Dropout) else value
            is_number = isinstance(p, int | float) and not isinstance(p, bool)
            if is_number and "drop" in name and _OWN_DROPOUT.search(name) and not _OTHER_DROPOUT.search(name):
                found.append(float(p))
    return max(found)


def _packing(batch: Any) -> tuple[bool, bool]:
    """Whether there are several documents in a row, and whether that is one row and all begin with one position.

    transformers goes by positions where there is no mask.
    """
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or batch.get("attention_mask") is not None:
        return False, True
    begins = positions[:, 1:] != positions[:, :-1] + 1
    first = torch.cat([positions[:, 0], positions[:, 1:][begins]])
    return bool(begins.any()), len(positions) == 1 and bool((first == positions.min()).all())
