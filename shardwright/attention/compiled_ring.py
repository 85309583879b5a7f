"""Ring attention as one operator that torch.compile keeps in one graph: nothing is looked at inside of it.

    ring_attention              q [B, H, Q, D], k and v [B, K, Q, .]    -> out [B, Q, H, Dv], lse [B, H, Q], seed []
    ring_attention_backward     dout [B, Q, H, Dv], and all of these    -> dq, dk, dv, of sinks [H or 0]

The seed is that of dropout, drawn inside, so that no graph takes it for a constant.

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
from .ring_turn import Setting, Terms, Turn, exact_dtype, run_ring, run_ring_backward
from .ulysses import SEQUENCE

_numbers = itertools.count()


class Turning(Protocol):
    def turn(self, setting: Setting, documents: Tensor | None) -> Turn: ...


_known: WeakValueDictionary[str, Turning] = WeakValueDictionary()


def name_of(attention: Turning) -> str:
    """A name under which the operators find `attention`, as long as it is there."""
    name = f"ring_{next(_numbers)}"
    _known[name] = attention
    return name


def _turn(
    name: str,
    documents: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
) -> Turn:
    return _known[name].turn(Setting(View(causal, window), scale, softcap, dropout), documents)


@torch.library.custom_op("shardwright::ring_attention", mutates_args=())
def _ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    name: str,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    turn = _turn(name, documents, causal, window, scale, softcap, dropout)
    seed = draw_seed() if dropout else 0
    out, lse = run_ring(turn, query, key, value, Terms(sinks, None, seed))
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
    documents: Tensor | None,
    sinks: Tensor | None,
    name: str,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    after: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    turn = _turn(name, documents, causal, window, scale, softcap, dropout)
    dout, out = dout.transpose(1, SEQUENCE), out.transpose(1, SEQUENCE)
    *gradients, dsinks, _ = run_ring_backward(
        turn, dout, query, key, value, out, lse, Terms(sinks, None, int(seed) if dropout else 0)
    )
    dq, dk, dv = (gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients)  # none is a view
    return dq, dk, dv, query.new_empty(0) if dsinks is None else dsinks


@_ring_backward.register_fake
def _(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return dq, dk, dv, query.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    query, key, value, documents, sinks, *ctx.settings, _ = inputs
    ctx.save_for_backward(query, key, value, *output, documents, sinks)
    ctx.has_sinks = sinks is not None


def _gradients(ctx: Any, dout: Tensor, *_: Any) -> tuple[Any, ...]:
    dq, dk, dv, dsinks = _ring_backward(dout, *ctx.saved_tensors, *ctx.settings)
    return dq, dk, dv, None, dsinks if ctx.has_sinks else None, *[None] * 7


_ring.register_autograd(_gradients, setup_context=_keep)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    name: str,
    setting: Setting,
) -> Tensor:
    """[B, Q, H, Dv]"""
    (causal, window), scale, softcap, dropout = setting
    out, *_ = _ring(query, key, value, documents, sinks, name, causal, window, scale, softcap, dropout)
    return out
