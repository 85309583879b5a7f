"""Ring attention as one operator that torch.compile keeps in one graph: nothing is looked at inside of it.

    ring_attention              q [B, H, Q, D], k and v [B, K, Q, .]    -> out [B, Q, H, Dv], lse [B, H, Q], seed []
    ring_attention_backward     dout [B, Q, H, Dv], and all of these    -> dq, dk, dv, of sinks [H or 0], of the bias

The seed is that of dropout, drawn inside, so that no graph takes it for a constant. Masks are read inside too. How long
sequences are without their padding, `[queries, keys]`, is given with them; nothing, where there is none.

An operator takes no rings, so it finds whose attention it computes by a name.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from .coordinates import draw_seed
from .masks import View
from .ring_turn import Extent, Setting, Terms, Turn, exact_dtype, run_ring, run_ring_backward
from .ulysses import SEQUENCE

_numbers = itertools.count()


class Turning(Protocol):
    def turn(self, setting: Setting, mask: Tensor | None, extent: Extent) -> Turn: ...
    def added(self, mask: Tensor | None, bias: Tensor | None, extent: Extent) -> Tensor | None: ...
    def held(self, query: Tensor, key: Tensor) -> tuple[int, int]: ...


_known: WeakValueDictionary[str, Turning] = WeakValueDictionary()


def name_of(attention: Turning) -> str:
    """A name under which the operators find `attention`, as long as it is there."""
    name = f"ring_{next(_numbers)}"
    _known[name] = attention
    return name


def _call_of(
    name: str,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    lengths: list[int],
    setting: Setting,
) -> tuple[Turn, Tensor | None]:
    """(the turn, all that is added to scores)"""
    ring = _known[name]
    held = ring.held(query, key)
    extent = Extent(held, (lengths[0], lengths[1]) if lengths else held)
    return ring.turn(setting, mask, extent), ring.added(mask, bias, extent)


@torch.library.custom_op("shardwright::ring_attention", mutates_args=())
def _ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    name: str,
    lengths: list[int],
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    setting = Setting(View(causal, window), scale, softcap, dropout)
    turn, added = _call_of(name, query, key, mask, bias, lengths, setting)
    seed = draw_seed() if dropout else 0
    out, lse = run_ring(turn, query, key, value, Terms(sinks, added, seed))
    return out, lse, torch.tensor(seed)


@_ring.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    samples, heads, length = query.shape[:-1]
    lse = query.new_empty((samples, heads, length), dtype=exact_dtype(query))
    return (
        query.new_empty((samples, length, heads, value.shape[-1])),
        lse,
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("shardwright::ring_attention_backward", mutates_args=())
def _ring_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    name: str,
    lengths: list[int],
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    setting = Setting(View(causal, window), scale, softcap, dropout)
    turn, added = _call_of(name, query, key, mask, bias, lengths, setting)
    dout, out = dout.transpose(1, SEQUENCE), out.transpose(1, SEQUENCE)
    terms = Terms(sinks, added, int(seed) if dropout else 0)
    *gradients, dsinks, dadded = run_ring_backward(turn, dout, query, key, value, out, lse, terms)
    dq, dk, dv = (gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients)  # none is a view
    dbias = None if bias is None or dadded is None else dadded.sum_to_size(bias.shape).contiguous()
    dsinks, dbias = (query.new_empty(0) if each is None else each for each in (dsinks, dbias))
    return dq, dk, dv, dsinks, dbias


@_ring_backward.register_fake
def _(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    bias: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    dsinks, dbias = (query.new_empty(0) if term is None else term.new_empty(term.shape) for term in (sinks, bias))
    return dq, dk, dv, dsinks, dbias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, mask, sinks, bias, *ctx.settings, _ = inputs
    ctx.save_for_backward(query, key, value, *output, mask, sinks, bias)
    ctx.has_sinks, ctx.has_bias = sinks is not None, bias is not None


def _gradients(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    dq, dk, dv, dsinks, dbias = _ring_backward(dout, *ctx.saved_tensors, *ctx.settings)
    return dq, dk, dv, None, dsinks if ctx.has_sinks else None, dbias if ctx.has_bias else None, *[None] * 8


_ring.register_autograd(_gradients, setup_context=_keep)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: tuple[Tensor | None, Tensor | None, Tensor | None],
    name: str,
    lengths: list[int],
    setting: Setting,
) -> Tensor:
    """[B, Q, H, Dv]; terms: mask, sinks and bias"""
    (causal, window), scale, softcap, dropout = setting
    out, *_ = _ring(query, key, value, *terms, name, lengths, causal, window, scale, softcap, dropout)
    return out
