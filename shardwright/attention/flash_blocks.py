"""Blocks of attention by the functions of flash-attn 2, where it is installed: they return the log-sum-exp, take fewer
heads of keys than of queries, and know soft caps.

The two functions are none of flash-attn's public ones. Their arguments are those of its versions 2.7 and 2.8; whatever
has others is left alone, and torch's own kernel computes blocks.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .installed import FLASH_2, find_installed

_MODULE = "flash_attn.flash_attn_interface"
_SETTINGS = {"dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes"}
_FORWARD = {"q", "k", "v", "return_softmax", *_SETTINGS}
_BACKWARD = {"dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "deterministic", *_SETTINGS}
_SEQUENCE, _HEADS = 2, 1  # flash-attn has them the other way round


class FlashBlocks(NamedTuple):
    """Tensors as in `blocks`: q [B, H, Q, D], k and v [B, K, ., D], lse [B, H, Q]."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None
    ) -> tuple[Tensor, Tensor]:
        """(out, lse in fp32)"""
        given = (_turned(tensor) for tensor in (q, k, v))
        out, lse, *_ = self.forward(*given, return_softmax=False, **_settings(scale, causal, softcap))
        return _turned(out), lse[..., : q.shape[_SEQUENCE]]

    def attend_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        causal: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of this block, from `out` and `lse` of all keys; those of keys and values are summed over the queries' heads
        that they serve.
        """
        dout, q, k, v, out = (_turned(tensor) for tensor in (dout, q, k, v, out))
        made = tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))
        self.backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            *made,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **_settings(scale, causal, softcap),
        )
        dq, dk, dv = (_turned(tensor) for tensor in made)
        return dq, dk, dv


@cache
def find_flash_blocks() -> FlashBlocks | None:
    """None where flash-attn is not installed, or is of a version whose functions are not known."""
    if FLASH_2 not in find_installed().versions:
        return None
    return of_module(importlib.import_module(_MODULE))


def of_module(module: Any) -> FlashBlocks | None:
    found = []
    for name, wanted in (("flash_attn_forward", _FORWARD), ("flash_attn_backward", _BACKWARD)):
        function = getattr(module, f"_wrapped_{name}", None) or getattr(module, f"_{name}", None)
        if function is None or not wanted <= _arguments(function):
            return None
        found.append(function)
    return FlashBlocks(*found)


def _arguments(function: Any) -> set[str]:
    operator = getattr(function, "default", None)  # of torch.ops, which has a schema and no signature
    if operator is not None:
        return {argument.name for argument in operator._schema.arguments}
    return set(inspect.signature(function).parameters)


def _settings(scale: float, causal: bool, softcap: float | None) -> dict[str, Any]:
    return {
        "dropout_p": 0.0,
        "softmax_scale": scale,
        "causal": causal,
        "window_size_left": -1,
        "window_size_right": 0 if causal else -1,
        "softcap": softcap or 0.0,
        "alibi_slopes": None,
    }


def _turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(_HEADS, _SEQUENCE)
