"""Kernels of GPUs that a CPU does not have, for tensors without memory: they keep less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from ..utils.torch_names import SDPA, FakeTensor

_aten = torch.ops.aten
_dropout = functional.dropout


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Inside, fakes are attended to and dropped out as on a GPU."""
    functional.scaled_dot_product_attention = _attend
    functional.dropout = _drop_out  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = SDPA
        functional.dropout = _dropout


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Nothing is dropped out: kernels of GPUs draw what they drop again in backward, and keep no more for it. A bias
    that is trained goes to the one kernel of theirs that has a gradient for it, in place of scores.
    """
    if not isinstance(query, FakeTensor):
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.requires_grad and query.shape[:2] == key.shape[:2]:
        bias = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        found = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, is_causal, scale=scale
        )
        out: torch.Tensor = found[0]
        return out
    return SDPA(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _drop_out(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """By a kernel that keeps a truth value of every element. A CPU keeps a number in its place, of the input's dtype,
    as GPUs do where the input itself is written to.
    """
    if isinstance(input, FakeTensor) and training and not inplace and 0 < p < 1:
        return torch.native_dropout(input, p, True)[0]
    return _dropout(input, p, training, inplace)
