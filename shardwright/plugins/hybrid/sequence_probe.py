"""What a model makes of split sequences, tried on a small copy of it in one process.

The copy gets its tokens in another order, with positions that say so, and an attention function that puts queries, keys
and values in order before the attention and back afterwards. If its logits and its loss are those of the plain call,
then tokens meet in that function alone, positions and masks are honoured, and sequences may be cut anywhere.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ...attention.ring import RingAttention
from ...attention.sequence_modes import attention_of, form_of, native_function, use_attention
from ...attention.ulysses import HEADS, SEQUENCE, AttentionFunction, Trade, Ulysses
from ...attention.zigzag import Share
from ...comm.ring import Ring
from ...models.config import follows_length, parts, shorten_windows
from ...shardformer.adapters import native_model
from ...shardformer.attention_routes import route_attention
from ...shardformer.layer.parallel_module import native_class
from ...shardformer.small_copy import build_small, take_own_functions
from ...utils.errors import said_in_model
from .layer_probe import CannotSplit
from .sequence_axis import IGNORED, Positions, SequenceFacts

_LENGTH, _WINDOW, _FIRST_WORD, _LAST_WORD = 16, 5, 5, 60
_SECOND = 7  # where the second document of a packed row begins
_BY_ITSELF = "its attention does not go through transformers' AttentionInterface"
Batch = dict[str, Any]


class Shuffle(Trade):
    """Stands for the ranks: one that holds the whole sequence, in another order."""

    def __init__(self, order: Tensor) -> None:
        self.rank, self.ranks, self.calls = 0, 1, 0
        self._order, self._back = order, order.argsort()

    def to_heads(self, x: Tensor, sizes: list[int]) -> Tensor:
        self.calls += 1
        return x.index_select(SEQUENCE, self._back)

    def to_sequence(self, out: Tensor, sizes: list[int]) -> Tensor:
        return out.index_select(HEADS, self._order)

    def share(self) -> Share:
        return Share(0, 1)


def probe_ulysses(model: nn.Module) -> SequenceFacts:
    """CannotSplit, naming what stands in the way, for a model that `all_to_all` cannot serve."""
    name = attention_of(native_model(model))
    form = form_of(name)
    if form is None:
        raise CannotSplit(f"its attention is {name!r}, and 'sdpa' or 'eager' would do")
    small = "sdpa" if form == "flash" else name

    def wrap(order: Tensor) -> tuple[AttentionFunction, Callable[[], int]]:
        trade = Shuffle(order)
        return Ulysses(trade, native_function(small), small), lambda: trade.calls

    return _Probe(model, small, wrap).facts()


def probe_ring(model: nn.Module) -> SequenceFacts:
    """The same for `ring_attn`, whose attention is its own."""
    native = native_model(model)

    def wrap(order: Tensor) -> tuple[AttentionFunction, Callable[[], int]]:
        shuffle = Shuffle(order)
        ring = RingAttention(shuffle.share(), [Ring(dist.GroupMember.WORLD, 0, 0, 1)])  # type: ignore[arg-type]

        def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
            q, k, v = (shuffle.to_heads(x, []) for x in (q, k, v))
            out, _ = ring(module, q, k, v, mask, **options)
            return shuffle.to_sequence(out, []), None

        return attention, lambda: shuffle.calls

    name = attention_of(native)
    return _Probe(model, "sdpa" if name.startswith("flash") else name, wrap).facts()


class _Probe:
    def __init__(self, model: nn.Module, name: str, wrap: Callable[[Tensor], Any]) -> None:
        native = native_model(model)
        config = copy.deepcopy(getattr(native, "config", None))
        if config is None or not hasattr(config, "_attn_implementation"):
            raise CannotSplit("it is none of transformers")
        for part in parts(config):
            if getattr(part, "output_router_logits", False):
                raise CannotSplit(
                    "output_router_logits=True adds a loss that is no sum over tokens; use output_router_logits=False"
                )
            if follows_length(part):
                raise CannotSplit("its rotary frequencies follow the length of what it is given")
            shorten_windows(part, _WINDOW)
            part._attn_implementation = name
        size = sum(param.numel() for param in native.parameters())
        small = build_small(native_class(native), copy.deepcopy(config), size, ranks=1)
        other = build_small(native_class(native), config, size, ranks=1)
        if small is None or other is None:
            raise CannotSplit("no small copy of it could be built to try it")
        for copied in (small, other):
            take_own_functions(native, copied)
        self._native, self._other = small, other
        generator = torch.Generator().manual_seed(0)
        self._order = torch.randperm(_LENGTH, generator=generator)
        function, self._calls = wrap(self._order)
        route_attention(other)
        use_attention(other, function, "probe")
        self._ids = torch.randint(_FIRST_WORD, _LAST_WORD, (3, _LENGTH), generator=generator)
        self._mask = torch.ones_like(self._ids)
        self._mask[1, -4:] = 0
        self._mask[2, :3] = 0
        self._places = torch.arange(_LENGTH).expand(3, -1)

    def facts(self) -> SequenceFacts:
        """Runs the copies; raises where the shuffled one differs."""
        with torch.no_grad():
            try:
                plain = self._plain()
            except Exception as error:  # of the model's own code
                raise CannotSplit(f"a call with input_ids alone fails ({said_in_model(error)})") from error
            if not isinstance(getattr(plain, "logits", None), Tensor) or plain.logits.shape[:2] != self._ids.shape:
                raise CannotSplit("its head gives no logits for every token")
            try:
                self._at_places()
            except Exception as error:
                raise CannotSplit(
                    f"with position_ids, which tell where a part stands, it fails ({said_in_model(error)})"
                ) from error
            self._words = plain.logits.shape[-1]
            self._compare("tokens in another order", {}, None)
            ones = torch.ones_like(self._ids)
            self._compare("padded sequences", {"attention_mask": self._mask, "position_ids": self._places}, self._mask)
            causal, (shifts, divides) = self._is_causal(), self._loss()
            parts = self._parts_documents(ones) if causal else (False, False, False)
            return SequenceFacts(causal, shifts, divides, self._positions(), parts, self._adds_types())

    def _plain(self, **batch: Any) -> Any:
        return self._native(**{"input_ids": self._ids, "use_cache": False, **batch})

    def _at_places(self, **batch: Any) -> Any:
        return self._plain(**{"position_ids": self._places, **batch})

    def _shuffled(self, batch: Batch) -> Any:
        """What the model with the function makes of a batch, tokens in the other order."""
        order, batch = self._order, dict(batch)
        documents = batch.pop("documents", None)
        mask = batch.pop("attention_mask", None)
        if mask is not None:
            documents = mask
        ids = batch.pop("input_ids", self._ids)
        places = batch.pop("position_ids", self._places)[: len(ids)]
        moved = {name: value[:, order] if isinstance(value, Tensor) else value for name, value in batch.items()}
        return self._other(
            input_ids=ids[:, order],
            position_ids=places[:, order],
            attention_mask=None if documents is None else documents.long()[:, None, None],
            use_cache=False,
            **moved,
        )

    def _compare(self, what: str, batch: Batch, mask: Tensor | None, documents: Tensor | None = None) -> None:
        expected = self._at_places(**batch).logits
        before = self._calls()
        try:
            got = self._shuffled({**batch, "documents": documents}).logits[:, self._order.argsort()]
        except Exception as error:  # of the model's own code, or of a function that cannot honour what it is asked
            if self._calls() == before:
                raise CannotSplit(_BY_ITSELF) from error
            raise CannotSplit(f"with {what} it fails ({said_in_model(error)})") from error
        if self._calls() == before:
            raise CannotSplit(_BY_ITSELF)
        if mask is not None:
            expected, got = expected[mask.bool()], got[mask.bool()]
        if not torch.allclose(expected, got, rtol=1e-6, atol=1e-6):
            raise CannotSplit(f"with {what} its logits are others, so that tokens meet outside of its attention")

    def _is_causal(self) -> bool:
        other = self._ids.clone()
        other[:, -1] = _LAST_WORD + 1
        first = self._at_places().logits[:, 0]
        return torch.allclose(first, self._at_places(input_ids=other).logits[:, 0])

    def _adds_types(self) -> bool:
        """Whether tokens in another order may bring token types of their own."""
        if "token_type_ids" not in inspect.signature(self._native.forward).parameters:
            return True
        kinds = getattr(self._native.config, "type_vocab_size", None) or 2
        batch = {"token_type_ids": (self._places // 3 + self._ids) % 5 % kinds}
        try:
            return _are_close(self._shuffled(batch).logits[:, self._order.argsort()], self._at_places(**batch).logits)
        except Exception:  # of the model's own code; it takes none
            return False

    def _positions(self) -> Positions:
        """Which positions the model makes up; logits of positions that are given tell."""
        padding = getattr(self._native.config, "pad_token_id", None)
        made = self._plain().logits
        starts = (0,) if padding is None else (0, padding + 1)
        first = next((start for start in starts if _are_close(self._starting_at(start), made)), None)
        if first is None:
            return Positions(None, None, False)
        seen = self._mask.bool()
        masked = self._plain(attention_mask=self._mask).logits[seen]
        under_mask = _are_close(self._starting_at(first, attention_mask=self._mask).logits[seen], masked)
        if padding is None or first == 0:
            return Positions(first, None, under_mask)
        ids = self._ids.masked_fill(self._mask == 0, padding)
        counted = self._mask.cumsum(1) * self._mask + padding
        made, places = self._plain(input_ids=ids).logits, {"input_ids": ids, "position_ids": counted}
        if _are_close(self._plain(**places).logits, made):
            return Positions(first, padding, under_mask)
        if _are_close(self._starting_at(first, input_ids=ids).logits, made):
            return Positions(first, None, under_mask)
        return Positions(None, None, False)

    def _starting_at(self, first: int, **batch: Any) -> Any:
        return self._plain(position_ids=self._places + first, **batch)

    def _parts_documents(self, ones: Tensor) -> tuple[bool, bool, bool]:
        """Whether positions that begin again begin another document; then that must hold of the function too."""
        places = torch.cat([torch.arange(_SECOND), torch.arange(_LENGTH - _SECOND)])[None]
        row, documents = self._ids[:1], ones[:1].clone()
        documents[:, _SECOND:] = 2
        found = [self._keeps_apart(row, places, cached, train) for cached, train in ((0, 0), (1, 0), (1, 1))]
        if any(found):
            self._compare("packed rows", {"input_ids": row, "position_ids": places}, None, documents)
        without, with_cache, in_training = found
        return without, with_cache, in_training

    def _keeps_apart(self, row: Tensor, places: Tensor, cached: int, train: int) -> bool:
        """Whether the second document of a row stays as it is when the first one changes."""
        other, found = row.clone(), []
        other[:, :_SECOND] += 1
        self._native.train(bool(train))
        for ids in (row, other):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # of dropout
                found.append(self._plain(input_ids=ids, position_ids=places, use_cache=bool(cached)).logits)
        self._native.eval()
        return torch.allclose(found[0][:, _SECOND:], found[1][:, _SECOND:], rtol=1e-6, atol=1e-6)

    def _loss(self) -> tuple[bool, bool]:
        """Whether labels are those of the next token, and whether `num_items_in_batch` divides."""
        labels = self._ids % self._words
        labels[0, :6], labels[2, 9:] = IGNORED, IGNORED
        moved = pad(labels[:, 1:], (0, 1), value=IGNORED)
        try:
            expected = self._at_places(labels=labels).loss
        except Exception as error:
            raise CannotSplit(
                f"it takes no label for every token, of which {IGNORED} does not count ({said_in_model(error)})"
            ) from error
        for shifts, extra in ((False, {}), (True, {"shift_labels": moved})):
            try:
                loss = self._shuffled({"labels": labels, **extra}).loss
            except Exception:  # arguments that it does not know
                continue
            if torch.allclose(expected, loss, rtol=1e-6, atol=1e-6):
                counted = moved if shifts else labels
                self._require_mean(labels, counted, expected)
                return shifts, self._divides(labels, expected, int((counted != IGNORED).sum()))
        raise CannotSplit("its loss is no mean over the labels of tokens")

    def _divides(self, labels: Tensor, expected: Tensor, count: int) -> bool:
        try:
            loss = self._at_places(labels=labels, num_items_in_batch=torch.tensor(count + 2)).loss
        except Exception:  # nor will it take it in a batch
            return False
        if torch.allclose(loss, expected * count / (count + 2), rtol=1e-6, atol=1e-6):
            return True
        if torch.allclose(loss, expected, rtol=1e-6, atol=1e-6):
            return False
        raise CannotSplit("its loss is neither divided by num_items_in_batch nor the same without")

    def _require_mean(self, labels: Tensor, counted: Tensor, expected: Tensor) -> None:
        total = torch.zeros_like(expected)
        for half in range(2):
            chosen = labels.clone()
            chosen[:, half::2] = IGNORED
            left = chosen if counted is labels else chosen[:, 1:]
            loss = self._at_places(labels=chosen).loss
            total += loss * (left != IGNORED).sum() / (counted != IGNORED).sum()
        if not torch.allclose(expected, total, rtol=1e-6, atol=1e-6):
            raise CannotSplit("its loss is no mean over the labels of tokens")


def _are_close(outputs: Any, logits: Tensor) -> bool:
    return torch.allclose(getattr(outputs, "logits", outputs), logits, rtol=1e-6, atol=1e-6)
