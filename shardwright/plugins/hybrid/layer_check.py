"""Whether the layers of a model may be given parts of sequences: planned and tried on a small copy of it.

A copy is run by the plan in one process, with its tokens in another order within the layers (`attention.exchange`) and
with padding. Its logits and losses must be those of the plain call.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...attention.exchange import Exchange, Shapes, Trial
from ...attention.padded_exchange import TrueLengths
from ...attention.sequence_modes import attention_of, form_of, native_function, use_attention
from ...attention.ulysses import AttentionFunction
from ...attention.whole_masks import OfParts, RingWithMasks, TradedHeads, TrialTrade, around_trial
from ...attention.zigzag import Share
from ...comm.ring import Ring
from ...models.config import is_encoder_decoder, parts, shorten_windows
from ...shardformer.adapters import has_adapters, native_model
from ...shardformer.attention_routes import makes_own_masks, route_attention
from ...shardformer.layer.parallel_module import native_class
from ...shardformer.small_copy import build_small
from ...utils.errors import said_in_model
from .layer_axis import ENCLOSED, LayerAxis, LayerFacts
from .layer_plan import LayerPlan, Stack
from .layer_probe import CannotSplit, TokenProbe
from .resolved import ResolvedLayout
from .sequence_axis import IGNORED

Said = TypeVar("Said")
_LOGGER = logging.getLogger(__name__)
_WINDOW, _MULTIPLE, _WORDS = 5, 4, 60
_LOSSES = ("own", "shifted", "computed")


def probe_layers(mode: str, model: nn.Module, reads: bool = False) -> LayerFacts:
    """Raises `CannotSplit` for a model whose layers cannot have parts of sequences.

    reads       it is given the states of an encoder that is no part of it
    """
    native = native_model(model)
    if "_loss_function" in vars(native):
        raise CannotSplit("it was given a loss_function, which its small copies do not have")
    name = attention_of(native)
    form = form_of(name)
    if form is None:
        raise CannotSplit(f"its attention is {name!r}, and 'sdpa' or 'eager' would do")
    name = "sdpa" if form == "flash" else name
    why = ""
    for trades, own_masks, wide in _forms(chooses=mode == "ring_attn" and name == "eager"):
        for joined in (False, True):
            copies = _Copies(mode, native, name, trades, reads)
            try:
                facts = copies.facts(joined, own_masks, wide)
            except CannotShorten as error:
                why = why or str(error)
                continue
            except CannotSplit as error:
                why = why or str(error)
                break
            return facts._replace(plan=of_all_layers(facts.plan, copies.plain, native))
    raise CannotSplit(why)


def _forms(chooses: bool) -> Iterator[tuple[bool, bool, bool]]:
    """Plans that are tried: (attention is traded, `LayerPlan.own_masks`, `Probe.wide`)."""
    yield True, False, False
    if chooses:
        yield True, True, False
    yield from ((False, False, False), (True, chooses, True), (False, False, True))


class CannotShorten(CannotSplit):
    """What follows the layers wants to be as long as what comes before them."""


class _Copies:
    """
    plain, other    equal small copies
    """

    def __init__(self, mode: str, native: nn.Module, name: str, trades: bool, reads: bool) -> None:
        self._mode, self._name, self._reads = mode, name, reads
        config = copy.deepcopy(getattr(native, "config", None))
        if config is None or not hasattr(config, "get_text_config"):
            raise CannotSplit("it is none of transformers")
        for part in parts(config):
            shorten_windows(part, _WINDOW)
            part._attn_implementation = name
        size = sum(param.numel() for param in native.parameters())
        made = [build_small(native_class(native), copy.deepcopy(config), size, ranks=1) for _ in range(3)]
        if any(each is None for each in made):
            raise CannotSplit("no small copy of it could be built to try it")
        for each in made[1:]:
            route_attention(each)  # type: ignore[arg-type]
        self.plain: nn.Module = made[0]  # type: ignore[assignment]
        self._other: nn.Module = made[1]  # type: ignore[assignment]
        words = min(getattr(self.plain.config.get_text_config(), "vocab_size", None) or _WORDS, _WORDS)  # type: ignore
        try:
            self._probe = TokenProbe(made[2], name, words, trades, reads)  # type: ignore[arg-type]
        except CannotSplit:
            raise
        except Exception as error:
            raise CannotSplit(f"no small copy of it could be tried ({said_in_model(error)})") from error

    def facts(self, joined: bool, own_masks: bool, wide: bool) -> LayerFacts:
        self._probe.wide = wide
        with torch.no_grad():
            try:
                if not isinstance(getattr(self._probe.run(), "logits", None), Tensor):
                    raise CannotSplit("its head gives no logits for every token")
                plan = self._probe.plan()
                plan.joined, plan.own_masks = joined, own_masks
            except CannotSplit:
                raise
            except Exception as error:  # of the model's own code
                raise CannotSplit(f"a call with input_ids and labels fails ({said_in_model(error)})") from error
            exchange = Trial(_MULTIPLE)
            self._apply(plan, exchange)
            causal, failures = self._is_causal(), []
            for loss in _LOSSES:
                facts = LayerFacts(plan, causal, loss, False, is_encoder_decoder(self.plain), self._reads)
                try:
                    self._try(facts, exchange)
                except CannotShorten:
                    raise
                except CannotSplit as error:
                    failures.append(str(error))
                    continue
                return facts._replace(divides=self._divides(loss != "own"))
        raise CannotSplit(failures[0])

    def _divides(self, shifts: bool) -> bool | None:
        """Whether the loss is divided by `num_items_in_batch`; None: it is neither that nor the same without."""
        batch = {"input_ids": self._probe.ids, "labels": self._probe.labels, "use_cache": False, **self._probe.states}
        counted = self._probe.labels[:, 1:] if shifts else self._probe.labels
        count = int((counted != IGNORED).sum())
        expected = self.plain(**batch).loss
        try:
            loss = self.plain(**batch, num_items_in_batch=torch.tensor(count + 2)).loss
        except Exception:  # nor will it take it in a batch
            return False
        if _close(loss, expected * count / (count + 2)):
            return True
        return False if _close(loss, expected) else None

    def _apply(self, plan: LayerPlan, exchange: Trial) -> None:
        native = native_function(self._name)
        parts: AttentionFunction = TradedHeads(TrialTrade(exchange), native)
        if self._mode == "ring_attn":
            parts = around_trial(exchange, one_ring())
        if plan.traded:
            function = OfParts(native, parts)
            use_attention(self._other, function, "trial", masks_of=_masks_of(self._mode, self._name, plan, self._other))
            function.split(map(self._other.get_submodule, plan.traded))
        if plan.joined and getattr(self._other, "base_model", self._other) is self._other:
            raise CannotSplit("what follows its layers wants whole sequences")
        plan.apply(self._other, exchange, self._mode == "ring_attn")

    def _is_causal(self) -> bool:
        """Of the last stack: whether the first token's logits do not see the last token."""
        changed = self._probe.labels if is_encoder_decoder(self.plain) else self._probe.ids
        if is_encoder_decoder(self.plain):
            return True
        other = changed.clone()
        other[:, -1] = (other[:, -1] - 4) % (_WORDS - 5) + 5
        first, second = (
            self.plain(input_ids=ids, use_cache=False, **self._probe.states).logits[:, 0] for ids in (changed, other)
        )
        return torch.allclose(first, second)

    def _try(self, facts: LayerFacts, exchange: Trial) -> None:
        axis = LayerAxis(self._mode, exchange, self._other, facts)
        probe = self._probe
        plain = {"input_ids": probe.ids, "labels": probe.labels, "use_cache": False, **probe.states}
        padded = {**plain, "attention_mask": probe.mask, **probe.masked_states}
        try:
            with axis.entered():
                self._compare(axis, facts, exchange, plain, None)
                loss = self._compare(axis, facts, exchange, padded, probe.mask)
                self._require_parts(axis, exchange, plain)
                if probe.states:
                    self._compare_without_states(axis, facts, exchange, plain)
            self._require_mean(facts, padded, loss)
        finally:
            axis.close()

    def _compare_without_states(
        self, axis: LayerAxis, facts: LayerFacts, exchange: Exchange, batch: Mapping[str, Any]
    ) -> None:
        batch = {name: value for name, value in batch.items() if name not in self._probe.states}
        try:
            self.plain(**batch)
        except Exception:  # of the model's own code: it does not go without
            return
        self._compare(axis, facts, exchange, batch, None)

    def _compare(
        self, axis: LayerAxis, facts: LayerFacts, exchange: Exchange, batch: Mapping[str, Any], mask: Tensor | None
    ) -> Tensor:
        expected = self.plain(**batch)
        if not isinstance(getattr(expected, "logits", None), Tensor) or expected.logits.dim() != 3:
            raise CannotSplit("its head gives no logits for every token")
        if not isinstance(expected.loss, Tensor) or expected.loss.dim():
            raise CannotSplit("its loss is no number")
        try:
            got = axis.with_own_loss(self._other(**axis.divide(batch)), batch)
        except ValueError as error:
            raise CannotSplit(said_in_model(error)) from error
        except Exception as error:  # of the model's own code
            raise CannotSplit(f"with parts of sequences in its layers it fails ({said_in_model(error)})") from error
        logits = exchange.gather(got.logits)[:, : expected.logits.shape[1]]
        kept = slice(None) if mask is None or facts.decodes else mask.bool()
        if logits.shape != expected.logits.shape or not _close(logits[kept], expected.logits[kept]):
            raise CannotSplit("with parts of sequences in its layers its logits are others")
        if not _close(got.loss, expected.loss):
            raise CannotSplit("its loss is no mean over the labels of tokens")
        loss: Tensor = expected.loss
        return loss

    def _require_parts(self, axis: LayerAxis, exchange: Trial, batch: Mapping[str, Any]) -> None:
        """What follows the layers takes parts as they are."""
        exchange.halves = True
        try:
            got = axis.with_own_loss(self._other(**axis.divide(batch)), batch)
        except Exception as error:  # of the model's own code
            raise CannotShorten(f"what follows its layers wants whole sequences ({said_in_model(error)})") from error
        finally:
            exchange.halves = False
        if got.logits.shape[1] >= batch["labels"].shape[1]:
            raise CannotSplit("its logits are those of whole sequences")

    def _require_mean(self, facts: LayerFacts, batch: Mapping[str, Any], expected: Tensor) -> None:
        total, labels = torch.zeros_like(expected), batch["labels"]
        skipped = 1 if facts.loss != "own" else 0
        if facts.decodes:  # else the decoder would read other labels
            batch = {**batch, "decoder_input_ids": self.plain.prepare_decoder_input_ids_from_labels(labels)}  # type: ignore
        for half in range(2):
            chosen = labels.clone()
            chosen[:, half::2] = IGNORED
            share = (chosen[:, skipped:] != IGNORED).sum() / (labels[:, skipped:] != IGNORED).sum()
            total += self.plain(**{**batch, "labels": chosen}).loss * share
        if not _close(expected, total):
            raise CannotSplit("its loss is no mean over the labels of tokens")


def one_ring(lengths: TrueLengths | None = None) -> RingWithMasks:
    return RingWithMasks(Share(0, 1), [Ring(dist.GroupMember.WORLD, 0, 0, 1)], lengths)  # type: ignore[arg-type]


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.double(), second.double(), rtol=1e-6, atol=1e-6)


# From the small copy to the model.


def of_all_layers(plan: LayerPlan, small: nn.Module, model: nn.Module) -> LayerPlan:
    """The plan for a model that may have more layers, each as the one of its kind in the small copy."""
    made = LayerPlan(joined=plan.joined, unsplit=plan.unsplit, own_masks=plan.own_masks)
    for stack in plan.stacks:
        prefix = stack.layers[0].rpartition(".")[0]
        kinds = {_kind(small.get_submodule(layer)): layer for layer in reversed(stack.layers)}
        layers = [f"{prefix}.{index}" for index, _ in enumerate(model.get_submodule(prefix).children())]
        made.stacks.append(Stack(layers, stack.gathers, stack.apart))
        for layer in layers:
            like = kinds.get(_kind(model.get_submodule(layer)))
            if like is None:
                raise CannotSplit(f"layer {layer} is of another kind than those of a small copy")
            _copy_below(plan.extras, made.extras, like, layer)
            _copy_below(plan.traded, made.traded, like, layer)
            _copy_below(plan.whole, made.whole, like, layer)
    return made


def _copy_below(old: Mapping[str, Said], new: dict[str, Said], like: str, layer: str) -> None:
    """What is said of the layer `like` and modules in it, said of `layer`."""
    for name, value in old.items():
        if name == like or name.startswith(f"{like}."):
            new[f"{layer}{name[len(like) :]}"] = value


def _kind(layer: nn.Module) -> tuple[tuple[str, str], ...]:
    """The modules of a layer, those that carry adapters as they were before."""
    found: list[tuple[str, str]] = []

    def walk(name: str, module: nn.Module) -> None:
        if has_adapters(module):
            module = module.base_layer  # type: ignore[assignment]
        found.append((name, native_class(module).__name__))
        for local, child in module.named_children():
            walk(f"{name}.{local}", child)

    walk("", layer)
    return tuple(found)


def _masks_of(mode: str, name: str, plan: LayerPlan, model: nn.Module) -> str:
    """The function whose masks a model makes: a ring does without those that are causal and nothing else."""
    needs_own = plan.whole or plan.own_masks or makes_own_masks(model)
    return "sdpa" if mode == "ring_attn" and not needs_own else name


def warn_of_whole(model: nn.Module, plan: LayerPlan, mode: str) -> None:
    """Name what every rank computes for whole sequences."""
    words = _whole_words(model, plan)
    if plan.unsplit:
        _LOGGER.warning(
            f"sequence_parallelism_mode={mode!r}: layers of {', '.join(plan.unsplit)} cannot have parts of sequences; "
            "every rank computes them whole"
        )
    if words:
        _LOGGER.warning(f"sequence_parallelism_mode={mode!r}: {words}, and what they keep for backward is not shared")


def with_layers(layout: ResolvedLayout, model: nn.Module, facts: object) -> ResolvedLayout:
    """`layout` with a word on modules that are given whole sequences; where all attention is, nothing of it is sent."""
    if not isinstance(facts, LayerFacts):
        return layout
    if facts.loss == ENCLOSED:
        layout = replace(layout, notes=(*layout.notes, _enclosed_words(facts.plan)))
    words = _whole_words(native_model(model), facts.plan)
    if not words:
        return layout
    if not facts.plan.traded:
        layout = replace(layout, traffic=tuple(row for row in layout.traffic if row.axis != "sp"))
    note = f"{words}: an all-gather and a reduce-scatter of hidden states each, which what is sent along sp leaves out"
    return replace(layout, notes=(*layout.notes, note))


def _enclosed_words(plan: LayerPlan) -> str:
    also = f", {', '.join(plan.unsplit)} among it" if plan.unsplit else ""
    return (
        f"every rank of sp computes what is around the split layers{also}, for whole sequences; an all-gather of "
        "hidden states behind the last layer and a reduce-scatter of their gradients are left out of what is sent"
    )


def _whole_words(model: nn.Module, plan: LayerPlan) -> str:
    classes = Counter(native_class(model.get_submodule(name)).__name__ for name in plan.whole)
    named = ", ".join(f"{number} {name}" for name, number in classes.items())
    return named and (
        f"{named} of {type(model).__name__} look along the sequence by themselves; every rank gathers whole sequences "
        "for them and computes them whole"
    )


def split_layers(
    mode: str, native: nn.Module, exchange: Exchange, function: AttentionFunction, copies: Any, facts: LayerFacts
) -> Shapes:
    """Let the layers of `native` work on parts; `function` is attention on them. Returns what stands for the ranks in
    the copies without data.
    """
    name = attention_of(native)
    if facts.plan.traded:
        own = OfParts(native_function(name), function)
        masks = name if facts.loss == ENCLOSED else _masks_of(mode, name, facts.plan, native)
        use_attention(native, own, mode, copies, masks_of=masks)
        own.split(map(native.get_submodule, facts.plan.traded))
    by_rows = mode == "ring_attn"
    facts.plan.apply(native, exchange, by_rows)
    shapes = Shapes(exchange.share)
    for copied in map(native_model, copies):
        facts.plan.apply(copied, shapes, by_rows)
    warn_of_whole(native, facts.plan, mode)
    return shapes
