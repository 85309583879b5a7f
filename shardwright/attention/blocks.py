"""Attention of a block of queries against a block of keys, which may be a part of what the queries see.

    scores = softcap(scale * q k^T) + bias              softcap(x) = cap * tanh(x / cap), if there is one
    lse    = log sum over keys of exp(scores)           -inf where a query sees no key of the block
    out    = (exp(scores - lse) * kept) v               kept: of dropout, which lse knows nothing of

Blocks are merged by their lse. The backward takes `out` and `lse` of *all* keys: then the gradients of blocks add up
to those of the whole.

Shapes: q [B, H, Q, D], k and v [B, K, ., D] with H a multiple of their heads, out [B, H, Q, Dv], lse [B, H, Q].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .coordinates import Dropout
from .flash_blocks import FlashBlocks, find_flash_blocks

_OPS = torch.ops.aten
_FUSED = (torch.float16, torch.bfloat16)
_WIDEST = 256  # head size of torch's flash kernels


class Rule(NamedTuple):
    """How a block is computed.

    causal  a query sees the keys up to its own index: queries and keys are the same tokens
    mask    [B or 1, 1 or H, Q, K], True where a query sees a key; None: all of them
    bias    [B or 1, 1 or H, Q or 1, K], added to scores
    """

    scale: float
    softcap: float | None = None
    causal: bool = False
    mask: Tensor | None = None
    bias: Tensor | None = None
    dropout: Dropout | None = None

    @property
    def is_plain(self) -> bool:
        """Whether kernels have a chance to know it."""
        return self.mask is None and self.bias is None and self.dropout is None


def attend(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """(out in q's dtype, lse in fp32 or better)"""
    flash = _flash_attn(q, v, rule)
    if flash is not None:
        return flash.attend(q, k, v, rule.scale, rule.causal, rule.softcap)
    k, v = _for_each(k, q), _for_each(v, q)
    if _kernel_fits(q, v, rule):
        if q.device.type == "cpu":
            out, lse = _OPS._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, rule.causal, scale=rule.scale)
        else:
            out, lse, *_ = _OPS._scaled_dot_product_flash_attention(
                q, k, v, 0.0, rule.causal, return_debug_mask=False, scale=rule.scale
            )
        return out, lse[..., : q.shape[2]]
    scores, _ = _scores(q, k, rule)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp_().nan_to_num_(0.0)  # -inf - -inf, where nothing is seen
    if rule.dropout is not None:
        weights *= rule.dropout.kept(weights)
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What this block adds to the gradients of q, k, v and of the bias, if there is one; `out` and `lse` are those of
    all keys.
    """
    flash = _flash_attn(q, v, rule)
    if flash is not None:
        return *flash.attend_backward(dout, q, k, v, out, lse, rule.scale, rule.causal, rule.softcap), None
    keys, values, dbias = _for_each(k, q), _for_each(v, q), None
    if _kernel_fits(q, v, rule):
        given = dout.contiguous(), q, keys, values, out, lse.contiguous()
        if q.device.type == "cpu":
            dq, dk, dv = _OPS._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, 0.0, rule.causal, scale=rule.scale
            )
        else:
            unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
            dq, dk, dv = _OPS._scaled_dot_product_flash_attention_backward(
                *given, None, None, q.shape[2], k.shape[2], 0.0, rule.causal, unused, unused[:0], scale=rule.scale
            )
    else:
        dq, dk, dv, dbias = _plain_backward(dout, q, keys, values, out, lse, rule)
    return dq, _summed(dk, k), _summed(dv, v), dbias


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) over the keys of both; `out` and what is returned in the dtype of lse."""
    both = torch.logaddexp(lse, more_lse)
    old, new = ((part - both).exp().nan_to_num(0.0).unsqueeze(-1) for part in (lse, more_lse))
    return out * old + more * new, both


def _flash_attn(q: Tensor, v: Tensor, rule: Rule) -> FlashBlocks | None:
    """flash-attn's functions, where they compute such a block."""
    return find_flash_blocks() if rule.is_plain and _flash_fits(q, v) else None


def _kernel_fits(q: Tensor, v: Tensor, rule: Rule) -> bool:
    """Whether torch's own kernel computes such a block."""
    if not rule.is_plain or rule.softcap is not None or q.shape[-1] != v.shape[-1]:
        return False
    return q.device.type == "cpu" or _flash_fits(q, v)


def _flash_fits(q: Tensor, v: Tensor) -> bool:
    """Whether there are flash kernels for such heads on this device."""
    if q.device.type != "cuda" or q.dtype not in _FUSED:
        return False
    if q.shape[-1] != v.shape[-1] or q.shape[-1] % 8 or q.shape[-1] > _WIDEST:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def _for_each(keys: Tensor, queries: Tensor) -> Tensor:
    """A head of keys for every head of queries."""
    groups = queries.shape[1] // keys.shape[1]
    return keys if groups == 1 else keys.repeat_interleave(groups, 1)


def _summed(gradient: Tensor, keys: Tensor) -> Tensor:
    """The gradient of a head of keys, over the query heads that it serves."""
    groups = gradient.shape[1] // keys.shape[1]
    if groups == 1:
        return gradient
    wide = gradient if gradient.dtype == torch.float64 else gradient.float()
    return wide.unflatten(1, (keys.shape[1], groups)).sum(2).to(gradient.dtype)


def _scores(q: Tensor, k: Tensor, rule: Rule) -> tuple[Tensor, Tensor | None]:
    """(masked scores in fp32 or better, the slope of the soft cap)"""
    scores = q @ k.transpose(-1, -2)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * rule.scale
    slope = None
    if rule.softcap is not None:
        bent = torch.tanh(scores / rule.softcap)
        scores, slope = bent * rule.softcap, 1 - bent.square()
    if rule.bias is not None:
        scores = scores + rule.bias
    if rule.causal:
        size = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(size, dtype=torch.bool, device=q.device).triu_(1), -torch.inf)
    if rule.mask is not None:
        scores = scores.masked_fill(~rule.mask, -torch.inf)
    return scores, slope


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    scores, slope = _scores(q, k, rule)
    weights = (scores - lse.unsqueeze(-1)).exp_().nan_to_num_(0.0)
    wide = weights.dtype
    dout, q, k, v, out = (tensor.to(wide) for tensor in (dout, q, k, v, out))
    dweights, used = dout @ v.transpose(-1, -2), weights
    if rule.dropout is not None:
        kept = rule.dropout.kept(weights)
        dweights, used = dweights * kept, weights * kept
    dv = used.transpose(-1, -2) @ dout
    dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True))
    dbias = None if rule.bias is None else dscores.sum_to_size(rule.bias.shape)
    if slope is not None:
        dscores = dscores * slope
    dscores = dscores * rule.scale
    return dscores @ k, dscores.transpose(-1, -2) @ q, dv, dbias
