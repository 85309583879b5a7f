"""Keys and values of the slices of a sequence that were there before: what attention of a later slice looks at.

A microbatch is one row of memory per layer for keys and one for values, [b, heads, S, d], filled slice by slice.
Attention of slice j gets the first `end_j` places of it; what it has saved of them stays as it is, since later slices
write behind them. The gradient of a key is the sum of what its own slice and all later ones give it. Backwards of
slices run last first, so that those of later ones are there when that of a slice runs: they wait in a second row of
memory, in fp32 at least.

A model is handed these as its cache of past keys and values, the interface that transformers' decoders generate text
with.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class _Row:
    """Keys, or values, of one layer and one microbatch.

    length  of the whole sequence
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._memory: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None  # of the places before the slice whose backward ran last

    def extended(self, new: torch.Tensor, start: int) -> torch.Tensor:
        """All places up to the end of the slice `new`, [..., s, d], which begins at `start`."""
        if self._memory is None:
            self._memory = new.new_empty((*new.shape[:-2], self._length, new.shape[-1]))
        # `data` counts its versions by itself: what earlier slices have saved is not written to.
        memory = self._memory.data
        memory.narrow(-2, start, new.shape[-2]).copy_(new)
        return memory.narrow(-2, 0, start + new.shape[-2])

    def gradient_of(self, gradient: torch.Tensor, start: int) -> torch.Tensor:
        """Of the slice that begins at `start`, from the gradient of all places up to its end."""
        size = gradient.shape[-2] - start
        own, before = gradient.narrow(-2, start, size), gradient.narrow(-2, 0, start)
        later = self._gradient
        if later is None:
            self._gradient = before.to(_summed_in(before.dtype), copy=True)
            return own
        self._gradient = later.narrow(-2, 0, start).add_(before)
        return (later.narrow(-2, start, size) + own).to(own.dtype)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: torch.Tensor, row: _Row, start: int) -> torch.Tensor:
        ctx.row, ctx.start = row, start
        return row.extended(new, start)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.row.gradient_of(gradient, ctx.start), None, None


class Past:
    """Keys and values of one microbatch in all layers that this rank holds.

    length  of its sequences
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._filling: dict[int, tuple[_Row, _Row]] = {}
        # of no use to other slices
        self._full: weakref.WeakValueDictionary[tuple[int, int], _Row] = weakref.WeakValueDictionary()

    def rows(self, layer: int, end: int) -> tuple[_Row, _Row]:
        """Of a layer, for a slice that reaches up to `end`."""
        full = self._full.get((layer, 0)), self._full.get((layer, 1))
        if full[0] is not None and full[1] is not None:
            return full[0], full[1]
        if layer not in self._filling:
            self._filling[layer] = _Row(self.length), _Row(self.length)
        rows = self._filling[layer]
        if end == self.length:
            del self._filling[layer]
            self._full[layer, 0], self._full[layer, 1] = rows
        return rows

    def before(self, start: int) -> Any:
        """What the model gets as `past_key_values` for the slice that begins at `start`."""
        return _cache_class()(self, start)


@functools.cache
def _cache_class() -> type:
    from transformers.cache_utils import Cache, DynamicLayer  # late: it takes seconds

    class SliceLayer(DynamicLayer):
        """Says how much came before; keeps nothing."""

        def __init__(self, start: int) -> None:
            super().__init__()
            self.start = start

        def get_seq_length(self, *_: Any) -> int:
            return self.start

    class SliceCache(Cache):
        is_of_slice = True
        is_compileable = False

        def __init__(self, past: Past, start: int) -> None:
            super().__init__(layers=[SliceLayer(start)])
            self.start = start
            self.updated: list[int] = []  # layers that asked, in their order
            self._past = past
            self._rows: dict[int, tuple[_Row, _Row]] = {}  # as long as somebody may run a layer again

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
        ) -> Any:
            self.updated.append(layer_idx)
            if layer_idx not in self._rows:
                self._rows[layer_idx] = self._past.rows(layer_idx, self.start + key_states.shape[-2])
            keys, values = self._rows[layer_idx]
            return _Extend.apply(key_states, keys, self.start), _Extend.apply(value_states, values, self.start)

        def get_seq_length(self, *_: Any, **__: Any) -> int:
            return self.start

        def get_mask_sizes(self, query_length: Any, *_: Any, **__: Any) -> tuple[int, int]:
            """A number before transformers 5.20 or so was the positions themselves."""
            return self.start + (query_length if isinstance(query_length, int) else query_length.shape[0]), 0

    return SliceCache
