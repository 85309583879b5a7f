"""Ring attention (`ring_turn`) as a function that models call: of autograd, or in a graph one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..comm.ring import Ring
from . import compiled_ring
from .coordinates import draw_seed
from .masks import View
from .ring_turn import Extent, Setting, Terms, Turn, run_ring, run_ring_backward
from .ulysses import SEQUENCE, require_view
from .zigzag import Share


class RingAttention:
    """An attention function in the words of transformers' `AttentionInterface`.

    pads    whether sequences have padding that it is told of
    """

    pads = False

    def __init__(self, share: Share, rings: Sequence[Ring]) -> None:
        self._share, self._rings = share, rings
        self._name = compiled_ring.name_of(self)

    def turn(self, setting: Setting, mask: Tensor | None, extent: Extent) -> Turn:
        return Turn(self._share, self._rings, setting, mask)

    def added(self, mask: Tensor | None, bias: Tensor | None, extent: Extent) -> Tensor | None:
        """`bias`, with what a mask adds to scores."""
        return bias

    def held(self, query: Tensor, key: Tensor) -> tuple[int, int]:
        """Queries and keys of all ranks together."""
        return query.shape[SEQUENCE] * self._share.ranks, key.shape[SEQUENCE] * self._share.ranks

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        setting = Setting(self._view(module, options), scale, softcap, float(dropout))
        sinks = sinks_of(module, query, options)
        extent = self._extent(module, query, key)
        attention_mask, bias = self._learned(attention_mask, self._bias(module, query, extent, options), extent)
        out: Tensor
        if torch.compiler.is_compiling():
            terms = attention_mask, sinks, bias
            lengths = [*extent.true] if self.pads else []
            out = compiled_ring.ring_attention(query, key, value, terms, self._name, lengths, setting)
            return out, None
        turn, bias = self.turn(setting, attention_mask, extent), self.added(attention_mask, bias, extent)
        seed = draw_seed() if dropout else 0
        out = _RingFunction.apply(query, key, value, sinks, bias, seed, turn)
        return out.transpose(1, SEQUENCE).contiguous(), None

    def _view(self, module: nn.Module, options: dict[str, Any]) -> View:
        return require_view(module, options)

    def _extent(self, module: nn.Module, query: Tensor, key: Tensor) -> Extent:
        held = self.held(query, key)
        return Extent(held, held)

    def _bias(self, module: nn.Module, query: Tensor, extent: Extent, options: dict[str, Any]) -> Tensor | None:
        """What is added to scores, see `ring_turn.Terms`, beside what a mask adds."""
        return None

    def _learned(self, mask: Tensor | None, bias: Tensor | None, extent: Extent) -> tuple[Tensor | None, Tensor | None]:
        """(mask, bias), where the mask needs no gradient."""
        return mask, bias


def sinks_of(module: nn.Module, query: Tensor, options: dict[str, Any]) -> Tensor | None:
    """[H]; what the model hands to its attention function, or what it leaves to it to find."""
    sinks = options.get("s_aux")
    if sinks is None:
        sinks = getattr(module, "sinks", None)
    if not isinstance(sinks, Tensor):
        return None
    if sinks.shape != (query.shape[1],):
        raise ValueError(
            f"attention sinks of shape {tuple(sinks.shape)} with sequence_parallelism_mode='ring_attn': a ring takes "
            f"one for each of {query.shape[1]} heads; use 'all_to_all'"
        )
    return sinks


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        bias: Tensor | None,
        seed: int,
        turn: Turn,
    ) -> Tensor:
        out, lse = run_ring(turn, query, key, value, Terms(sinks, bias, seed))
        result = out.transpose(1, SEQUENCE)
        ctx.save_for_backward(query, key, value, result, lse, sinks, bias)
        ctx.turn, ctx.seed = turn, seed
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks, bias = ctx.saved_tensors
        terms = Terms(sinks, bias, ctx.seed)
        return *run_ring_backward(ctx.turn, dout, query, key, value, out, lse, terms), None, None
