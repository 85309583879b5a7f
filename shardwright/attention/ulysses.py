"""Attention over a sequence that is spread over ranks, by trading it for heads: before the model's own attention
function every rank gets the whole sequence of some heads, and afterwards all heads of its part of the sequence.

    query [B, H, S/n, D] -> [B, H/n, S, D]      likewise key and value
    out   [B, S, H/n, D] -> [B, S/n, H, D]

Four all-to-alls per layer, and four in the backward. What the function itself does (soft caps, sinks, dropout) goes
through untouched: it may be a ring (`ring.RingAttention`), in which the ranks that trade stand in one place. Heads that
do not divide are dealt out unevenly; a head of keys that the query heads of several ranks
look at is sent to all of them, and its gradients are summed where it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops.collective import all_to_all_in_group
from ..ops.compiled import name_of
from ..ops.compiled_heads import trade_heads
from ..utils.tensors import numbers_for
from .heads import HeadShares, share_heads
from .masks import View, WholeMasks
from .zigzag import Share

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]

BATCH, HEADS, SEQUENCE = 0, 1, 2
_OUT_SEQUENCE, _OUT_HEADS = 1, 2
# What says where tokens are, for this rank's part of them alone.
_LOCAL = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cache_position")


class Trade:
    """Sequences for heads over `group`. Sequences are held in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._name = group, name_of(group)
        self.rank, self.ranks = group.rank(), group.size()

    def to_heads(self, x: Tensor, sizes: list[int]) -> Tensor:
        """[B, sum(sizes), S/n, D] -> [B, sizes[rank], S, D]"""
        if torch.compiler.is_compiling():
            return trade_heads(x, self._name, sizes, (HEADS, SEQUENCE), True)
        return all_to_all_in_group(x, self._group, HEADS, SEQUENCE, scatter_sizes=sizes)

    def to_sequence(self, out: Tensor, sizes: list[int]) -> Tensor:
        """[B, S, sizes[rank], D] -> [B, S/n, sum(sizes), D]"""
        if torch.compiler.is_compiling():
            return trade_heads(out, self._name, sizes, (_OUT_HEADS, _OUT_SEQUENCE), False)
        return all_to_all_in_group(out, self._group, _OUT_SEQUENCE, _OUT_HEADS, gather_sizes=sizes)

    def share(self) -> Share:
        return Share(self.rank, self.ranks)


class Ulysses:
    """An attention function in the words of transformers' `AttentionInterface`.

    native  finds the function that the model would have called: native(module)
    kind    "sdpa", "eager" or "flash": the form of mask that it takes; "documents": as `masks` has them
    """

    def __init__(self, trade: Trade, native: Callable[[nn.Module], AttentionFunction], kind: str) -> None:
        self._trade, self._native, self._kind = trade, native, kind
        self._masks = WholeMasks()

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        view = self._view(module, options)
        shares = share_heads(query.shape[HEADS], key.shape[HEADS], self._trade.ranks)
        sizes, order = list(shares.queries), shares.key_order
        if order is not None:
            index = numbers_for(key, tuple(order))
            key, value = key.index_select(HEADS, index), value.index_select(HEADS, index)
        query = self._trade.to_heads(query, sizes)
        key = self._trade.to_heads(key, shares.key_sizes)
        value = self._trade.to_heads(value, shares.key_sizes)
        if query.shape[HEADS]:
            out = self._whole(module, query, key, value, attention_mask, view, shares, options)
        else:  # still part of the graph, whose backward has all-to-alls and, under ZeRO 3, gathers
            nothing = key.sum() + value.sum()  # of another length than queries, across from a decoder
            for learned in _learned(module, attention_mask, options):
                nothing = nothing + learned.sum()
            out = (query[..., :1] + nothing).expand(*query.shape[:-1], value.shape[-1]).transpose(HEADS, SEQUENCE)
        return self._trade.to_sequence(out, sizes), None

    def _view(self, module: nn.Module, options: dict[str, Any]) -> View:
        return require_view(module, options)

    def _whole(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        view: View,
        shares: HeadShares,
        options: dict[str, Any],
    ) -> Tensor:
        """Attention of this rank's heads, one at least, over the whole sequence: [B, S, h, D]."""
        rank, length = self._trade.rank, query.shape[SEQUENCE]
        kept = {name: option for name, option in options.items() if name not in _LOCAL}
        local: dict[str, Any] = {"num_key_value_groups": shares.groups[rank]}
        first = sum(shares.queries[:rank])
        mine = slice(first, first + shares.queries[rank])
        if kept.get("s_aux") is not None:
            kept["s_aux"] = kept["s_aux"][mine]
        sinks = getattr(module, "sinks", None)
        if isinstance(sinks, Tensor):
            local["sinks"] = sinks[mine]
        seen: Any = HeadsOf(module, local)
        mask: Tensor | None
        if self._kind == "eager":
            mask = self._masks.additive(view, documents, length, query.device, query.dtype)
        elif self._kind == "sdpa":
            mask = self._masks.boolean(view, documents, length, query.device)
        elif self._kind == "documents":
            mask = documents
        else:
            mask = None if documents is None else documents[:, 0, 0] > 0
        out, _ = self._native(module)(seen, query, key, value, mask, **kept)
        return out


def _learned(module: nn.Module, mask: Tensor | None, options: dict[str, Any]) -> list[Tensor]:
    """What joins the scores and has a gradient: a bias by relative position, also as a mask; sinks."""
    terms = (mask, options.get("position_bias"), options.get("s_aux"), getattr(module, "sinks", None))
    return [term for term in terms if isinstance(term, Tensor) and term.requires_grad]


class HeadsOf:
    """An attention module as the function sees it: with some of the heads, everything else is the module's own."""

    def __init__(self, module: nn.Module, local: dict[str, Any]) -> None:
        self.__dict__.update({"_module": module, **local})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @staticmethod
    def whole(module: Any) -> Any:
        """The module itself."""
        return module._module if isinstance(module, HeadsOf) else module


def require_view(module: nn.Module, options: dict[str, Any]) -> View:
    """Who sees whom, from what a model hands to its attention function; ValueError for what cannot be honoured."""
    given = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if given is None else given)
    window = options.get("sliding_window")
    if window is not None and (not causal or not isinstance(window, int)):
        raise ValueError(f"sliding_window={window!r} of attention to both sides is not computed on split sequences")
    if options.get("position_bias") is not None:
        raise ValueError("a bias by relative position is not computed on split sequences")
    return View(causal, window)
