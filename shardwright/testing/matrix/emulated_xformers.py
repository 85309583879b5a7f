"""A stand-in for xformers, which has no kernels for CPUs: its function, as products and a softmax.

It refuses what the documentation of `memory_efficient_attention` does not allow, so that a layout of tensors, a mask or
a bias that its kernels would not take is an error here too. What the kernels compute is not tried.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...attention import choice
from ...attention.needs import CPU

_NAMES = ("xformers", "xformers.ops")
_ALIGNED = 8  # elements at whose multiples rows of a bias begin


@contextmanager
def emulated_xformers() -> Iterator[None]:
    """Inside, `attention_backend="xformers"` can be had on a CPU, in double precision too."""
    package, ops = (ModuleType(name) for name in _NAMES)
    masks = ModuleType("attn_bias")
    masks.LowerTriangularFromBottomRightMask = _FromBottomRight  # type: ignore[attr-defined]
    ops.fmha = ModuleType("fmha")  # type: ignore[attr-defined]
    ops.fmha.attn_bias = masks  # type: ignore[attr-defined]
    ops.memory_efficient_attention = _attention  # type: ignore[attr-defined]
    package.ops = ops  # type: ignore[attr-defined]
    kept = {name: sys.modules.get(name) for name in _NAMES}
    table = choice.TABLE
    (row,) = (each for each in table if each.name == "xformers")
    dtypes = row.dtypes | {torch.float64}
    try:
        sys.modules |= dict(zip(_NAMES, (package, ops), strict=True))
        choice.TABLE = (*table, replace(row, devices=frozenset({CPU}), dtypes=dtypes, package=""))
        yield
    finally:
        choice.TABLE = table
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class _FromBottomRight:
    """Causal, where the last query sees every key."""


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Queries [B, M, H, K], keys [B, N, H, K], values [B, N, H, V], a bias [B, H, M, N] -> [B, M, H, V]."""
    batch, rows, heads, width = query.shape
    columns = key.shape[1]
    assert key.shape == (batch, columns, heads, width), f"keys {tuple(key.shape)} for queries {tuple(query.shape)}"
    assert value.shape[:3] == key.shape[:3], f"values {tuple(value.shape)} for keys {tuple(key.shape)}"
    assert query.dtype == key.dtype == value.dtype, "queries, keys and values have one dtype"
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = (q * (width**-0.5 if scale is None else scale)) @ k.transpose(-1, -2)
    if isinstance(attn_bias, _FromBottomRight):
        seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    elif attn_bias is not None:
        assert attn_bias.shape == (batch, heads, rows, columns), f"a bias {tuple(attn_bias.shape)}"
        assert attn_bias.dtype == query.dtype, f"a bias in {attn_bias.dtype} for {query.dtype}"
        assert attn_bias.stride(-1) == 1, "its rows are contiguous"
        assert rows == 1 or attn_bias.stride(-2) % _ALIGNED == 0, "its rows begin at multiples of 8 elements"
        scores = scores + attn_bias
    return (F.dropout(scores.softmax(-1), p) @ v).transpose(1, 2)
