"""Attention on parts of sequences for models that make masks, positions and biases of whole ones.

A model whose layers alone are given parts (`plugins.hybrid.layer_plan`) hands masks to its attention as it always
does: [B, 1 or H, S, T], or none. They are honoured as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.ring import Ring
from .exchange import Exchange
from .extra_terms import with_alibi
from .heads import HeadShares
from .masks import View
from .padded_exchange import TrueLengths, cropped, padded
from .ring import RingAttention
from .ring_turn import Block, Extent, Setting, Turn
from .ulysses import HEADS, SEQUENCE, AttentionFunction, HeadsOf, Trade, Ulysses
from .zigzag import Share

_HAS_PARTS = "_shardwright_has_parts"
_HIDDEN = 0.5  # of the least number: a term that hides a key


class OfParts:
    """An attention function that works on parts where its module has been said to have parts (`split`), and is the
    model's own elsewhere.
    """

    def __init__(self, native: Callable[[nn.Module], AttentionFunction], parts: AttentionFunction) -> None:
        self._split: WeakSet[nn.Module] = WeakSet()
        self._native, self._parts = native, parts

    def split(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            self._split.add(module)
            setattr(module, _HAS_PARTS, True)  # what a graph can look at

    def __call__(self, module: nn.Module, query: Tensor, *args: Any, **options: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if not (getattr(module, _HAS_PARTS, False) if compiling else module in self._split):
            return self._native(module)(module, query, *args, **options)
        return self._parts(module, query, *args, **options)


class TrialTrade(Trade):
    """Stands for the ranks, see `exchange.Trial`."""

    def __init__(self, exchange: Exchange) -> None:
        self.rank, self.ranks, self._exchange = 0, 1, exchange

    def to_heads(self, x: Tensor, sizes: list[int]) -> Tensor:
        return self._exchange.gather_padded(x, SEQUENCE)

    def to_sequence(self, out: Tensor, sizes: list[int]) -> Tensor:
        return self._exchange.part(out, 1)


class TradedHeads(Ulysses):
    """With the masks of whole sequences.

    around_ring     `native` is a ring, which knows what it has of them
    lengths         of sequences that are padded; None: none are
    """

    def __init__(
        self,
        trade: Trade,
        native: Callable[[nn.Module], AttentionFunction],
        around_ring: bool = False,
        lengths: TrueLengths | None = None,
    ) -> None:
        super().__init__(trade, native, "whole")
        self._around_ring, self._lengths = around_ring, lengths

    def _view(self, module: nn.Module, options: dict[str, Any]) -> View:
        return View(False, None)  # the mask says who sees whom

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
        rank, heads = self._trade.rank, sum(shares.queries)
        first, number = sum(shares.queries[:rank]), shares.queries[rank]
        length = query.shape[SEQUENCE]
        if self._lengths is not None and not self._around_ring:
            queries, keys = self._lengths.of_attention(module, length, key.shape[SEQUENCE])
            query = cropped(query, SEQUENCE, queries)
            key, value = (cropped(x, SEQUENCE, keys) for x in (key, value))

        def mine(of_heads: Any, dim: int) -> Any:
            if not isinstance(of_heads, Tensor) or of_heads.shape[dim] != heads or heads == 1:
                return of_heads
            return of_heads.narrow(dim, first, number)

        if options.get("position_bias") is not None:
            bias = options["position_bias"]
            if not self._around_ring:
                bias = whole_bias(module, bias, query.shape[SEQUENCE], key.shape[SEQUENCE])
            options["position_bias"] = mine(bias, HEADS)
        if options.get("alibi") is not None:
            options["alibi"] = mine(options["alibi"], HEADS)
        if options.get("s_aux") is not None:
            options["s_aux"] = mine(options["s_aux"], 0)
        local: dict[str, Any] = {"num_key_value_groups": shares.groups[rank]}
        if isinstance(getattr(module, "sinks", None), Tensor):
            local["sinks"] = mine(module.sinks, 0)
        seen: Any = HeadsOf(module, local)
        mask = documents if documents is None or documents.dim() < 4 else mine(documents, HEADS)
        out, _ = self._native(module)(seen, query, key, value, mask, **options)
        return padded(out, 1, length)


def whole_bias(module: nn.Module, bias: Tensor, queries: int, keys: int) -> Tensor | None:
    """A bias by relative position of whole sequences of these lengths. T5 makes one of zeros, as long as what it sees,
    where a module has none.
    """
    if bias.shape[-2:] == (queries, keys):
        return bias
    assert not getattr(module, "has_relative_attention_bias", True), f"a bias of shape {tuple(bias.shape)}"
    return None


class MaskedTurn(Turn):
    """With the mask of whole sequences.

    mask            [B or 1, 1 or H, S or 1, T], True where a query may see a key
    extent          S and T; no query sees padding
    """

    def __init__(
        self, share: Share, rings: Sequence[Ring], setting: Setting, mask: Tensor | None, extent: Extent
    ) -> None:
        super().__init__(share, rings, setting, None)
        self._mask, self._extent = mask, extent

    def blocks(self, source: int, length: int, device: torch.device) -> Iterator[Block]:
        if self._mask is None and self.setting.view.causal:  # padding comes last
            yield from super().blocks(source, length, device)
            return
        mask, theirs = self._mask, self.share.of_rank(source)
        held, true = self._extent.held[1], self._extent.true[1]
        keys = sum(max(0, min(stop, true) - start) for start, stop in theirs.spans(held))
        if keys == 0:
            return
        if mask is not None:
            if mask.shape[-2] > 1:
                mask = mask.index_select(-2, self._extent.rows(self.share, device))
            mask = mask.index_select(-1, theirs.positions(held, device)[:keys])
        yield Block(slice(0, length), slice(0, keys), self._rule(False, mask))


class RingWithMasks(RingAttention):
    """Ring attention with the masks of whole sequences, which say all there is to say of windows and documents.

    Options of the model's attention function besides those of any:

    position_bias   [B or 1, H, S/n, T]: this rank's rows of it, see `layer_plan`, or all of them
    alibi           [B, H, T], a term for each key

    lengths         of sequences that are padded; None: none are
    """

    def __init__(self, share: Share, rings: Sequence[Ring], lengths: TrueLengths | None = None) -> None:
        super().__init__(share, rings)
        self._lengths, self.pads = lengths, lengths is not None
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        alibi = options.get("alibi")
        if alibi is None or query.shape[HEADS] != key.shape[HEADS]:
            return super().__call__(module, query, key, value, *args, **options)
        # Features travel with their keys, so that kernels compute blocks.
        width, scale = value.shape[-1], options.get("scaling") or query.shape[-1] ** -0.5
        alibi = self._share.part(padded(alibi, -1, key.shape[SEQUENCE] * self._share.ranks), -1)
        query, key, value = with_alibi(query, key, value, alibi, scale)
        out, _ = super().__call__(module, query, key, value, *args, **{**options, "alibi": None, "scaling": scale})
        return out[..., :width], None

    def _view(self, module: nn.Module, options: dict[str, Any]) -> View:
        """Where there is a mask, it says all there is to say."""
        given, window = options.get("is_causal"), options.get("sliding_window")
        causal = bool(getattr(module, "is_causal", True) if given is None else given)
        return View(causal, window if causal and isinstance(window, int) else None)

    def turn(self, setting: Setting, mask: Tensor | None, extent: Extent) -> Turn:
        return MaskedTurn(self._share, self._rings, setting, self._as_bool(mask), extent)

    def _extent(self, module: nn.Module, query: Tensor, key: Tensor) -> Extent:
        extent = super()._extent(module, query, key)
        if self._lengths is None:
            return extent
        return extent._replace(true=self._lengths.of_attention(HeadsOf.whole(module), *extent.held))

    def _as_bool(self, mask: Tensor | None) -> Tensor | None:
        return mask if mask is None or mask.dtype == torch.bool else self._parts_of(mask)[0]

    def _parts_of(self, mask: Tensor) -> tuple[Tensor, bool]:
        """(where a query may see a key, whether a mask has terms that are added to scores)"""
        if mask not in self._known:
            seen = _seen(mask)
            self._known[mask] = seen, not bool((~seen | (mask == 0)).all())
        known: tuple[Tensor, bool] = self._known[mask]
        return known

    def _bias(self, module: nn.Module, query: Tensor, extent: Extent, options: dict[str, Any]) -> Tensor | None:
        bias, alibi = options.get("position_bias"), options.get("alibi")
        if bias is not None and bias.shape[-2:] == extent.true:  # which the model made itself
            bias = bias.index_select(-2, extent.rows(self._share, query.device))
        elif bias is not None:
            bias = whole_bias(module, bias, query.shape[SEQUENCE], extent.true[1])
        return _sum(bias, None if alibi is None else alibi[:, :, None])

    def added(self, mask: Tensor | None, bias: Tensor | None, extent: Extent) -> Tensor | None:
        if mask is None or mask.dtype == torch.bool or not self._parts_of(mask)[1]:
            return bias
        return _sum(bias, self._terms(mask, self._parts_of(mask)[0], extent))

    def _learned(self, mask: Tensor | None, bias: Tensor | None, extent: Extent) -> tuple[Tensor | None, Tensor | None]:
        """A bias that a model learns may come as a mask, such as BEiT's. A graph's operator has no gradient of masks,
        but one of biases.
        """
        if mask is None or not mask.requires_grad:
            return mask, bias
        seen = _seen(mask)
        return seen, _sum(bias, self._terms(mask, seen, extent))

    def _terms(self, mask: Tensor, seen: Tensor, extent: Extent) -> Tensor:
        """What a mask adds to the scores of this rank's queries."""
        terms = mask.masked_fill(~seen, 0.0)
        return terms.index_select(-2, extent.rows(self._share, mask.device)) if terms.shape[-2] > 1 else terms


def _seen(mask: Tensor) -> Tensor:
    """Where a query may see a key, of a mask that is added to scores."""
    return ~(mask <= torch.finfo(mask.dtype).min * _HIDDEN)


def _sum(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first if second is None else first + second


def around_trial(exchange: Exchange, ring: RingAttention) -> AttentionFunction:
    """`ring` of one rank, for a sequence in another order."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
    ) -> Any:
        query, key, value = (exchange.gather_padded(x, SEQUENCE) for x in (query, key, value))
        out, _ = ring(module, query, key, value, attention_mask, **options)
        return exchange.part(out, 1), None

    return attention
