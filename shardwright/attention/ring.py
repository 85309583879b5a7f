"""Ring attention (`ring_turn`) as a function that models call: of autograd, or in a graph one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..comm.ring import Ring
from . import compiled_ring
from .masks import View
from .ring_turn import Setting, Turn, run_ring, run_ring_backward
from .ulysses import SEQUENCE, require_view
from .zigzag import Share


class RingAttention:
    """An attention function in the words of transformers' `AttentionInterface`."""

    def __init__(self, share: Share, rings: Sequence[Ring]) -> None:
        self._share, self._rings = share, rings
        self._name = compiled_ring.name_of(self)

    def turn(self, setting: Setting, documents: Tensor | None) -> Turn:
        return Turn(self._share, self._rings, setting, documents)

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
        if dropout:
            raise ValueError(
                f"dropout={dropout} of attention with sequence_parallelism_mode='ring_attn': blocks are computed once "
                "more in the backward, and would need the same numbers; use 0, or 'all_to_all'"
            )
        if options.get("s_aux") is not None or isinstance(getattr(module, "sinks", None), Tensor):
            raise ValueError("attention sinks are not computed in a ring; use sequence_parallelism_mode='all_to_all'")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        setting = Setting(self._view(module, options), scale, softcap)
        if torch.compiler.is_compiling():
            return compiled_ring.ring_attention(query, key, value, attention_mask, self._name, setting), None
        turn = self._turn(module, query, key, attention_mask, setting)
        out: Tensor = _RingFunction.apply(query, key, value, turn)
        return out.transpose(1, SEQUENCE).contiguous(), None

    def _view(self, module: nn.Module, options: dict[str, Any]) -> View:
        return require_view(module, options)

    def _turn(self, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, setting: Setting) -> Turn:
        return self.turn(setting, mask)


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, turn: Turn) -> Tensor:
        out, lse = run_ring(turn, query, key, value)
        result = out.transpose(1, SEQUENCE)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.turn = turn
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        return *run_ring_backward(ctx.turn, dout, query, key, value, out, lse), None
