"""Terms that a fused kernel does not know, added to its scores through features of queries and keys.

A kernel computes scale * q @ k. A score that is to get a term t of its own gets it from a feature more: with
q' = [q, t / scale] and k' = [k, 1] the kernel computes scale * q @ k + t. What differs by query goes into queries, what
differs by key into keys, and no [S, S] bias is made. Values get as many features of zeros, since kernels want equal
widths.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_WIDTH = 8  # kernels take head_dims that are a multiple of it


def padded_width(width: int) -> int:
    """Of heads with features more."""
    return -(-width // _WIDTH) * _WIDTH


def in_two(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[...] -> [..., 2] of `dtype`, which sum to `x` with the digits of both; the gradient flows through the second."""
    first = x.detach().to(dtype)
    return torch.stack([first, (x - first.to(x.dtype)).to(dtype)], dim=-1)


def with_terms(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, of_query: torch.Tensor, of_key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[B, H, S, D], [B, H, T, D], [B, H, T, Dv] with features [..., n] more, all padded with zeros to one width."""
    query = torch.cat([query, of_query.expand(*query.shape[:-1], -1)], dim=-1)
    key = torch.cat([key, of_key.expand(*key.shape[:-1], -1)], dim=-1)
    width = padded_width(max(query.shape[-1], value.shape[-1]))
    return _padded(query, width), _padded(key, width), _padded(value, width)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(x, (0, width - x.shape[-1]))


def sdpa_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sinks: torch.Tensor,
    scale: float,
    is_causal: bool,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Softmax over the keys' scores and, for each head, one learned score `sinks` [H] that has no value: a key more,
    which every query sees, whose value is zero. [B, H, S, D] -> [B, H, S, Dv].

    The mask is a bool or an additive one [B, 1 or H, S, T], or None.
    """
    length, keys, width = query.shape[2], key.shape[2], value.shape[-1]
    if attention_mask is None and is_causal:
        attention_mask = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    if attention_mask is not None:
        seen = True if attention_mask.dtype == torch.bool else 0.0
        attention_mask = F.pad(attention_mask, (0, 1), value=seen)
    of_query = in_two(sinks.float() / scale if sinks.dtype.itemsize < 4 else sinks / scale, query.dtype)
    marks = key.new_zeros(keys + 1, 2)
    marks[keys] = 1
    key, value = F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1))
    query, key, value = with_terms(query, key, value, of_query[None, :, None], marks)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=False, scale=scale
    )
    return out[..., :width]


def hidden_wholly(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask that is added to scores with -inf in the place of the least number, for a fused kernel. Of a row that sees
    no key the kernel keeps the logarithm of a sum that is lost beside that number, so that its backward takes every
    weight for 1; a row of -inf is zeros, and its gradient too.
    """
    if mask is None or not mask.is_floating_point():
        return mask
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)


def with_alibi(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, alibi: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With features that add a term per key and head, `alibi` [B, H, T], to scores of this scale."""
    ones = in_two(torch.full((), 1 / scale, dtype=torch.float64, device=query.device), query.dtype)
    return with_terms(query, key, value, ones, alibi.to(key.dtype)[..., None].expand(*alibi.shape, 2))


def sdpa_with_alibi(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    alibi: torch.Tensor,
    scale: float,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attention with a term per key and head, `alibi` [B, H, T]. [B, H, S, D] -> [B, H, S, Dv]."""
    width, mask = value.shape[-1], hidden_wholly(attention_mask)
    query, key, value = with_alibi(query, key, value, alibi, scale)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out[..., :width]
