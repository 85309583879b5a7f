"""Ring attention: every rank keeps the queries of its part of the sequence, keys and values travel from rank to rank.

With n ranks a forward sends n - 1 times a rank's keys and values, (n - 1) / n of all of them; a backward sends them
once more, and their gradients as often. What travels is sent on before the block that has come is computed.

Under a causal mask parts are those of the zig-zag (`zigzag.Share`): of every pair of ranks each computes half a block,
whoever's keys come.

    own keys          queries see keys up to their own place
    keys of rank < k  all queries see the first piece, none the second
    keys of rank > k  the second piece of queries sees all keys, the first none

A sink, one score per head that has no value, joins once all blocks are merged:

    lse' = logaddexp(lse, sink)     out' = out * exp(lse - lse')

and the backward of the blocks, which takes out' and lse', counts it by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import turns
from ..comm.ring import Ring
from .blocks import Rule, attend, attend_backward, merge
from .coordinates import Dropout
from .masks import View, visible
from .ulysses import SEQUENCE
from .zigzag import Share

_KEYS, _GRADIENTS = 0, 1  # tags


class Block(NamedTuple):
    """Queries start .. stop of a rank against keys start .. stop of what has come, and their positions in the
    sequence.
    """

    queries: slice
    keys: slice
    rule: Rule


class Setting(NamedTuple):
    """What does not depend on who holds which tokens."""

    view: View
    scale: float
    softcap: float | None
    dropout: float = 0.0


class Extent(NamedTuple):
    """Of queries and keys of whole sequences.

    held    by all ranks together
    true    without padding, which comes last
    """

    held: tuple[int, int]
    true: tuple[int, int]

    def rows(self, share: Share, device: torch.device) -> Tensor:
        """Positions of a rank's queries; where they are padding, that of the last one."""
        return share.positions(self.held[0], device).clamp(max=self.true[0] - 1)


class Terms(NamedTuple):
    """What scores get besides.

    sinks   one score per head, [H]
    bias    of this rank's queries with all keys, [B or 1, 1 or H, Q or 1, T]
    seed    of dropout
    """

    sinks: Tensor | None = None
    bias: Tensor | None = None
    seed: int = 0


_NONE = Terms()


class Turn:
    """One call: who holds what, and who sees whom.

    rings       outermost first, see `comm.ring.rings_of`
    documents   see `masks`
    """

    def __init__(self, share: Share, rings: Sequence[Ring], setting: Setting, documents: Tensor | None) -> None:
        self.share, self.rings, self.setting, self.documents = share, list(rings), setting, documents

    def source(self, steps: Sequence[int]) -> int:
        """Whose keys a rank has after so many steps in every ring."""
        rank, inner = self.share.rank, self.rings[-1].size
        if len(self.rings) == 1:
            return (rank - steps[0]) % inner
        outer = (rank // inner - steps[0]) % self.rings[0].size
        return outer * inner + (rank % inner - steps[1]) % inner

    def blocks(self, source: int, length: int, device: torch.device) -> Iterator[Block]:
        """What is to be computed with the keys of rank `source`; `length` tokens are held by each rank."""
        view, rank = self.setting.view, self.share.rank
        everything, half = slice(0, length), length // 2
        if not view.causal:
            queries, keys, causal = everything, everything, False
        elif source == rank:
            queries, keys, causal = everything, everything, True
        elif source < rank:
            queries, keys, causal = everything, slice(0, half), False
        else:
            queries, keys, causal = slice(half, length), everything, False
        if self.documents is None and (view.window is None or view.window >= length * self.share.ranks):
            yield Block(queries, keys, self._rule(causal, None))
            return
        whole = length * self.share.ranks
        of_queries = self.share.positions(whole, device)[queries]
        of_keys = self.share.of_rank(source).positions(whole, device)[keys]
        if view.window is not None and self._too_far(source, whole, queries, keys):
            return
        mask = visible(view._replace(causal=causal), self.documents, of_queries, of_keys)
        yield Block(queries, keys, self._rule(False, mask))

    def _rule(self, causal: bool, mask: Tensor | None) -> Rule:
        return Rule(self.setting.scale, self.setting.softcap, causal, mask)

    def _too_far(self, source: int, whole: int, queries: slice, keys: slice) -> bool:
        """Whether all keys lie before the windows of all queries."""
        mine, theirs = self.share.spans(whole), self.share.of_rank(source).spans(whole)
        first = mine[0 if queries.start == 0 else -1][0]
        last = max(stop for _, stop in (theirs if keys.stop == whole // self.share.ranks else theirs[:1]))
        assert self.setting.view.window is not None
        return first - (last - 1) >= self.setting.view.window

    def columns(self, block: Block, source: int, keys: Tensor) -> Tensor:
        """Positions of the block's keys in the whole sequence, of the keys of rank `source`."""
        whole = keys.shape[SEQUENCE] * self.share.ranks
        return self.share.of_rank(source).positions(whole, keys.device)[block.keys]

    def rule(self, block: Block, source: int, keys: Tensor, length: int, terms: Terms) -> Rule:
        """That of the block with its part of `terms`; this rank has `length` queries."""
        rule = block.rule
        if terms.bias is not None:
            rows = terms.bias if terms.bias.shape[SEQUENCE] == 1 else terms.bias[:, :, block.queries]
            rule = rule._replace(bias=rows.index_select(-1, self.columns(block, source, keys)))
        if self.setting.dropout:
            rows = self.share.positions(length * self.share.ranks, keys.device)[block.queries]
            dropped = Dropout(self.setting.dropout, terms.seed, rows, self.columns(block, source, keys))
            rule = rule._replace(dropout=dropped)
        return rule

    # Travelling.

    def around(self, keys: Tensor, compute: Callable[[Tensor, int], None], done: tuple[int, ...] = ()) -> None:
        """Let `compute(keys, source)` see the keys of every rank."""
        ring = self.rings[len(done)]
        for step in range(ring.size):
            coming = ring.pass_on(keys, _KEYS) if step + 1 < ring.size else None
            steps = (*done, step)
            if len(steps) < len(self.rings):
                self.around(keys, compute, steps)
            else:
                compute(keys, self.source(steps))
            if coming is not None:
                keys = turns.wait(coming, keys)

    def gather_back(self, keys: Tensor, compute: Callable[[Tensor, int], Tensor], done: tuple[int, ...] = ()) -> Tensor:
        """The sum, for the keys that this rank began with, of what `compute(keys, source)` made of them on all
        ranks.
        """
        ring = self.rings[len(done)]
        own: Tensor | None = None
        passed = None
        for step in range(ring.size):
            coming = ring.pass_on(keys, _KEYS) if step + 1 < ring.size else None
            steps = (*done, step)
            if len(steps) < len(self.rings):
                made = self.gather_back(keys, compute, steps)
            else:
                made = compute(keys, self.source(steps))
            if step == 0:
                own = made
            else:
                if passed is not None:
                    made = made + turns.wait(passed, made)
                passed = ring.pass_on(made, _GRADIENTS)
            if coming is not None:
                keys = turns.wait(coming, keys)
        assert own is not None
        return own if passed is None else own + turns.wait(passed, own)


def run_ring(turn: Turn, query: Tensor, key: Tensor, value: Tensor, terms: Terms = _NONE) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, Dv] in the dtype of the query, lse [B, H, Q])"""
    size, length = key.shape[-1], query.shape[SEQUENCE]
    exact = exact_dtype(query)
    out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=exact)
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=exact)

    def compute(keys: Tensor, source: int) -> None:
        for block in turn.blocks(source, length, query.device):
            k, v = keys[:, :, block.keys].split([size, keys.shape[-1] - size], -1)
            mine = query[:, :, block.queries]
            more, more_lse = attend(mine, k, v, turn.rule(block, source, keys, length, terms))
            merged = merge(out[:, :, block.queries], lse[:, :, block.queries], more, more_lse)
            out[:, :, block.queries], lse[:, :, block.queries] = merged

    turn.around(torch.cat([key, value], -1), compute)
    if terms.sinks is not None:
        without, lse = lse, torch.logaddexp(lse, terms.sinks.to(exact)[:, None])
        out *= (without - lse).exp().unsqueeze(-1)
    # Heads behind tokens, as the projection behind wants them: then it keeps no copy.
    return out.transpose(1, SEQUENCE).to(query.dtype).contiguous(), lse


def run_ring_backward(
    turn: Turn,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    terms: Terms = _NONE,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key, value, and of sinks and bias, if there are any; `dout` and `out` [B, H, Q, Dv]."""
    size, length = key.shape[-1], query.shape[SEQUENCE]
    dquery = torch.zeros_like(query, dtype=lse.dtype)
    dsinks = None if terms.sinks is None else _of_sinks(dout, out, lse, terms.sinks)
    dbias = None if terms.bias is None else torch.zeros_like(terms.bias, dtype=lse.dtype)

    def compute(keys: Tensor, source: int) -> Tensor:
        gradient = torch.zeros_like(keys)
        for block in turn.blocks(source, length, query.device):
            q, o, d = (tensor[:, :, block.queries] for tensor in (query, out, dout))
            k, v = keys[:, :, block.keys].split([size, keys.shape[-1] - size], -1)
            rule = turn.rule(block, source, keys, length, terms)
            dq, dk, dv, more = attend_backward(d, q, k, v, o, lse[:, :, block.queries], rule)
            dquery[:, :, block.queries] += dq
            gradient[:, :, block.keys] = torch.cat([dk, dv], -1)
            if dbias is not None and more is not None:
                rows = dbias if dbias.shape[SEQUENCE] == 1 else dbias[:, :, block.queries]
                rows.index_add_(-1, turn.columns(block, source, keys), more)
        return gradient

    dkeys = turn.gather_back(torch.cat([key, value], -1), compute)
    dk, dv = dkeys.split([size, dkeys.shape[-1] - size], -1)
    if dbias is not None and terms.bias is not None:
        dbias = dbias.to(terms.bias.dtype)
    return dquery.to(query.dtype), dk, dv, dsinks, dbias


def _of_sinks(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """A sink's weight is exp(sink - lse), and it has no value: out falls by what the weight takes."""
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(weights * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum((0, 2)).to(sinks.dtype)


def exact_dtype(query: Tensor) -> torch.dtype:
    """What sums and their logarithms are kept in."""
    return query.dtype if query.dtype == torch.float64 else torch.float32
