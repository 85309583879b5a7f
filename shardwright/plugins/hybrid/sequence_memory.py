"""What a rank keeps of sequences that it shares with others, for the layout report.

Of everything but attention it keeps what a sequence of its part's length would leave. What attention leaves is told
by a stand-in, as long as it is for shapes: in ring_attn its part of queries, keys, values and outputs; where ranks
trade, some heads of whole sequences, which are as much, and the output once more, traded back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...attention.heads import share_heads
from ...attention.sequence_modes import name_attention
from ...attention.ulysses import HEADS, SEQUENCE
from ...shardformer.adapters import native_model
from ...shardformer.attention_routes import route_attention
from ..settings import HybridSettings
from .resolved import ResolvedLayout
from .sequence_traffic import part_length, traded_by


def kept_attention(settings: HybridSettings) -> Callable[[nn.Module], None] | None:
    """Lets a model without data have attention that keeps what the mode's does; None: its own tells."""
    if (settings.layout.sp_size or 1) == 1:
        return None
    stand_in = KeptAttention(traded_by(settings), in_ring=settings.sequence_mode == "ring_attn")

    def give(model: nn.Module) -> None:
        route_attention(native_model(model))
        name_attention(stand_in, "kept", [native_model(model)])

    return give


class KeptAttention:
    """An attention function in the words of transformers' `AttentionInterface`, for tensors without data.

    among    ranks that trade sequences for heads; the one with most heads is counted
    in_ring  blocks make masks when they need them, and keep none
    """

    def __init__(self, among: int, in_ring: bool) -> None:
        self._among, self._in_ring = among, in_ring

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        samples, heads, length, _ = query.shape
        if self._among == 1:
            return scaled_dot_product_attention(query, key, value).transpose(HEADS, SEQUENCE), None
        shares, whole = share_heads(heads, key.shape[HEADS], self._among), length * self._among
        window, mask = options.get("sliding_window"), None
        if window is not None and window < whole and not self._in_ring:
            mask = query.new_empty(1, 1, whole, whole, dtype=torch.bool)

        def traded(x: Tensor, heads: int) -> Tensor:
            return _traded(x, (samples, heads, whole, x.shape[-1]))

        most_keys = max(shares.key_sizes)
        out = scaled_dot_product_attention(
            traded(query, max(shares.queries)), traded(key, most_keys), traded(value, most_keys), mask
        )
        return _traded(out, (samples, length, heads, out.shape[-1])), None


def _traded(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    made: Tensor = _Traded.apply(x, shape)
    return made


class _Traded(torch.autograd.Function):
    """What came of a trade; it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        raise AssertionError("nothing is differentiated here")


def with_parts(layout: ResolvedLayout, settings: HybridSettings, length: int | None) -> ResolvedLayout:
    """`layout` with a word on who holds what of a sequence of `length` tokens."""
    ranks, among = settings.layout.sp_size or 1, traded_by(settings)
    if ranks == 1:
        return layout
    held = f"1/{ranks}" if length is None else f"{part_length(settings, length)} of {length} tokens"
    how = f"{among} ranks trade them for heads" if among > 1 else ""
    if ranks > among:
        how += f"{', ' * bool(how)}keys go round {ranks // among} places"
    note = f"every rank holds {held} of each sequence in all layers; around attention {how}"
    return replace(layout, notes=(*layout.notes, note))
