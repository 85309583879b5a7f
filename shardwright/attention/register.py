"""Attention functions for whole sequences in transformers' registers.

The names of ours must not have "sdpa", "flash" or "flex_attention" in them, which transformers searches names for. A
mask function is registered with each: under a name that has none, models make no mask at all, not even for padding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .backends import Sdpa, varlen_attention, xformers_attention
from .choice import TABLE, Choice
from .model_needs import Part
from .needs import Needs

OWN = "shardwright_"
_OWN = {
    "cudnn": "shardwright_cudnn",
    "flash": "shardwright_fa",
    "efficient": "shardwright_efficient",
    "math": "shardwright_math",
    "xformers": "shardwright_xformers",
    "varlen": "shardwright_varlen",
}
_ON_GPUS = ("cudnn", "efficient", "xformers", "varlen")
_WITH_SINKS = "shardwright_sinks"
_THEIRS = {"flex": "flex_attention"}


def implementation_of(choice: Choice, needs: Needs) -> str:
    """The name in transformers' registers that computes `choice`."""
    if choice.backend == "sdpa" and needs.sinks:
        return _WITH_SINKS
    name = _OWN.get(choice.backend)
    if name is None:
        return _THEIRS.get(choice.backend, choice.backend)
    return name if choice.asked or choice.backend in ("math", "xformers", "varlen") else f"{name}_first"


@cache
def register_attention() -> None:
    """Make the functions of `attention.backends` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface(), AttentionMaskInterface()
    sdpa, with_mask, unpadded = functions["sdpa"], masks["sdpa"], masks["flash_attention_2"]
    own: dict[str, Any] = {_WITH_SINKS: Sdpa(sdpa), _OWN["xformers"]: xformers_attention}
    for kernel in ("cudnn", "flash", "efficient", "math"):
        own[_OWN[kernel]] = Sdpa(sdpa, kernel)
        own[f"{_OWN[kernel]}_first"] = Sdpa(sdpa, kernel, only=False)
    for name, function in own.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, with_mask)
    AttentionInterface.register(_OWN["varlen"], varlen_attention)
    AttentionMaskInterface.register(_OWN["varlen"], unpadded)


def on_a_cpu(name: str | None) -> str | None:
    """What computes the same where a copy of a model is tried on the CPU in fp64: the implementation itself, or torch's
    SDPA in place of kernels that GPUs alone have.
    """
    own = any(name == f"{_OWN[kernel]}{end}" for kernel in _ON_GPUS for end in ("", "_first"))
    theirs = name is not None and (name.startswith(("flash_attention", "flex_attention")) or "/" in name)
    return "sdpa" if own or theirs else name


def set_implementation(part: Part, name: str) -> None:
    """Let a part of a model compute its attention with what transformers calls `name`."""
    if part.config._attn_implementation == name:
        return
    model: Any = part.model
    part.config._attn_implementation_internal = model._check_and_adjust_attn_implementation(name)


def guard(part: Part, name: str) -> None:
    """Have packed documents refused that `name` would let see each other."""
    if name.startswith("flash_attention"):
        part.attention[0].register_forward_pre_hook(refuse_packed_rows, with_kwargs=True)


def refuse_packed_rows(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """transformers looks for packed documents before flash-attn where a batch has one row, and else in its masks, of
    which flash-attn has none.
    """
    positions = kwargs.get("position_ids")
    if torch.compiler.is_compiling() or kwargs.get("attention_mask") is not None:
        return
    if not isinstance(positions, torch.Tensor) or positions.ndim != 2 or len(positions) == 1:
        return
    if bool((positions[:, 1:] != positions[:, :-1] + 1).any()):
        raise ValueError(
            "flash-attn, through transformers, finds packed documents in batches of one row only, and this one has "
            f"{len(positions)} with positions that begin again; use one row, or attention_backend='varlen' or 'sdpa', "
            "or give such a batch as example_inputs, so that enable_flash_attention=True knows"
        )


def is_foreign(name: str | None) -> bool:
    """Whether an implementation is of the user's own, or from the Hub."""
    known = {*_OWN.values(), *(f"{own}_first" for own in _OWN.values()), _WITH_SINKS}
    return name is not None and name not in known and name not in {backend.takes for backend in TABLE}
