"""Whether layers may be given parts of sequences by a model of which all else is computed for whole ones: planned and
tried on a small copy of it.

What comes before the layers and behind them (patches, embeddings, heads, losses) is computed by every rank alike, so
that it may be anything: images, sounds, heads with one answer for a sequence, losses that are no mean over tokens. Each
list of layers (a tower) is tried by itself: given parts at its first layer and gathered behind the last, or, where
somebody reads what is between them, at every layer. Its outputs must be those of the plain call.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...attention.padded_exchange import PaddedTrial
from ...attention.sequence_modes import attention_of, form_of, native_function, use_attention
from ...attention.ulysses import AttentionFunction
from ...attention.whole_masks import OfParts, TradedHeads, TrialTrade, around_trial
from ...models.config import parts, shorten_windows
from ...models.dry_run import call_model
from ...models.example_inputs import training_batches
from ...models.layer_chain import layer_lists
from ...models.shared_layers import repeated_applications
from ...models.windows import why_no_sequence
from ...shardformer.adapters import native_model
from ...shardformer.attention_routes import route_attention
from ...shardformer.layer.parallel_module import native_class
from ...shardformer.layer.sequence import first_tensor
from ...shardformer.small_copy import build_small
from ...utils.errors import said_in_model
from ...utils.tensors import map_tensors
from .enclosed_axis import without_caches
from .layer_axis import ENCLOSED, LayerFacts
from .layer_check import of_all_layers, one_ring
from .layer_plan import LayerPlan, Stack, tensors_in
from .layer_probe import CannotSplit, Probe, Sizes

_WINDOW, _MULTIPLE, _SEEDS = 5, 4, (2, 3)
_MOST_BATCHES = 2  # that are compared
_FORMS = tuple((apart, trades) for apart in (False, True) for trades in (True, False))
Batch = Any


def probe_enclosed(mode: str, model: nn.Module, example: Any = None) -> LayerFacts:
    """Raises `CannotSplit` for a model of which less than half of the layers can have parts of sequences.

    example     a batch, where the user gave one
    """
    native = native_model(model)
    why = why_no_sequence(native)
    if why:
        raise CannotSplit(why)
    tried = _Tried(mode, native, example)
    lists = _lists(tried.plain)
    if not lists:
        raise CannotSplit("it has no list of layers")
    sizes = {name: sum(param.numel() for param in native.get_submodule(name).parameters()) for name in lists}
    plan, refused = LayerPlan(), dict[str, str]()
    for name, layers in lists.items():
        try:
            _add(plan, tried.plan_of(layers))
        except CannotSplit as error:
            refused[name] = str(error)
    left_out = sorted(refused, key=lambda name: -sizes[name])
    if not plan.stacks or 2 * sum(sizes[name] for name in left_out) > sum(sizes.values()):
        raise CannotSplit(refused[left_out[0]])
    tried.compare(plan)
    plan.unsplit = tuple(name for name in left_out if any(True for _ in native.get_submodule(name).parameters()))
    return LayerFacts(of_all_layers(plan, tried.plain, native), True, ENCLOSED, False, False)


def _lists(model: nn.Module) -> dict[str, list[str]]:
    """The layers of every list by its name; where none is found, of that whose layers run again and again."""
    found = {name: [f"{name}.{index}" for index in range(len(each))] for name, each in layer_lists(model)}
    if not found:
        for layer in dict.fromkeys(repeated_applications(model) or ()):
            found.setdefault(layer.rpartition(".")[0], []).append(layer)
    return found


def _add(plan: LayerPlan, more: LayerPlan) -> None:
    plan.stacks += more.stacks
    for name in ("extras", "traded", "whole"):
        getattr(plan, name).update(getattr(more, name))


class _Ran(NamedTuple):
    batch: Batch
    outputs: list[Tensor]


class _Tried:
    """
    plain   a small copy
    """

    def __init__(self, mode: str, native: nn.Module, example: Any) -> None:
        self._mode = mode
        name = attention_of(native)
        self._name = "sdpa" if form_of(name) in ("flash", None) else name
        failures: list[str] = []
        for narrow in (True, False):
            made = _small(native, self._name, narrow, keep_inputs=example is not None)
            if made is None:
                continue
            found: list[_Ran] = []
            for batch in _batches(made, example):
                try:
                    found.append(_Ran(batch, _run(made, batch)))
                except Exception as error:  # of the model's own code, on a batch that was guessed
                    failures.append(said_in_model(error))
                if len(found) == _MOST_BATCHES:
                    break
            if found:
                self.plain: nn.Module = made
                self._ran = found
                return
        raise CannotSplit(
            f"no batch is known that it can be tried with ({failures[0]}); pass one as example_inputs"
            if failures
            else "no small copy of it could be built to try it"
        )

    def plan_of(self, layers: list[str]) -> LayerPlan:
        """The plan of one list of layers."""
        why = ""
        for apart, trades in _FORMS:
            try:
                plan = self._planned(Stack(layers, True, apart), trades)
                self.compare(plan)
            except CannotSplit as error:
                why = why or str(error)
                continue
            return plan
        raise CannotSplit(why)

    def _planned(self, stack: Stack, trades: bool) -> LayerPlan:
        probe = _EnclosedProbe(self._copy(), self._name, trades, self._ran[0].batch)
        try:
            return probe.plan([stack])
        except CannotSplit:
            raise
        except Exception as error:  # of the model's own code
            raise CannotSplit(f"its layers cannot be tried by themselves ({said_in_model(error)})") from error

    def _copy(self) -> nn.Module:
        copied = copy.deepcopy(self.plain)
        route_attention(copied)
        return copied

    def compare(self, plan: LayerPlan) -> None:
        """CannotSplit where outputs are others."""
        model, exchange = self._copy(), PaddedTrial(_MULTIPLE)
        native = native_function(self._name)
        split: AttentionFunction = TradedHeads(TrialTrade(exchange), native, lengths=exchange.lengths)
        if self._mode == "ring_attn":
            split = around_trial(exchange, one_ring(exchange.lengths))
        if plan.traded:
            function = OfParts(native, split)
            use_attention(model, function, "trial", masks_of=self._name)
            function.split(map(model.get_submodule, plan.traded))
        plan.apply(model, exchange, self._mode == "ring_attn")
        for batch, expected in self._ran:
            try:
                got = _run(model, batch)
            except Exception as error:  # of the model's own code
                raise CannotSplit(f"with parts of sequences in its layers it fails ({said_in_model(error)})") from error
            same = len(got) == len(expected) and all(map(_is_close, got, expected))
            if not same:
                raise CannotSplit("with parts of sequences in its layers its outputs are others")


class _EnclosedProbe(Probe):
    """Of any batch."""

    def __init__(self, model: nn.Module, name: str, trades: bool, batch: Batch) -> None:
        super().__init__(model, name, trades)
        self._batch = batch

    def run(self) -> Any:
        return _run(self.model, self._batch)

    def _sizes(self, stack: Stack, is_last: bool) -> Sizes:
        layer = next(name for name in stack.layers if self.call_of(self.model.get_submodule(name)) is not None)
        call = self.call_of(self.model.get_submodule(layer))
        assert call is not None
        hidden = first_tensor(call.args, call.kwargs)
        kind = type(self.model.get_submodule(layer)).__name__
        if hidden.dim() != 3 or not hidden.is_floating_point() or hidden.shape[1] < 2:
            raise CannotSplit(
                f"its layers ({kind}) are given {list(hidden.shape)}, which is no batch of sequences [B, S, H]"
            )
        samples, length = hidden.shape[:2]
        read = {
            each.shape[1]
            for each in call.given().values()
            if each.dim() == 3 and each.is_floating_point() and each.shape[0] == samples and each.shape[1] > 1
        }
        return Sizes(samples, (length, *sorted(read - {length})))


def _small(native: nn.Module, name: str, narrow: bool, keep_inputs: bool) -> nn.Module | None:
    config = copy.deepcopy(getattr(native, "config", None))
    if config is None or not hasattr(config, "get_text_config"):
        raise CannotSplit("it is none of transformers")
    for part in parts(config):
        shorten_windows(part, _WINDOW)
        if form_of(str(part._attn_implementation)) in ("flash", None):
            part._attn_implementation = name
    size = sum(param.numel() for param in native.parameters())
    return build_small(native_class(native), config, size, ranks=1, narrow=narrow, keep_inputs=keep_inputs)


def _batches(model: nn.Module, example: Any) -> Iterator[Batch]:
    if example is not None:
        dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
        yield map_tensors(lambda one: one.to("cpu", dtype if one.is_floating_point() else one.dtype), example)
        return
    known: set[tuple[str, ...]] = set()
    for first, second in zip(*(training_batches(model, seed) for seed in _SEEDS), strict=True):
        if tuple(first) not in known:
            known.add(tuple(first))
            yield _three(first, second)
            yield first


def _three(first: Mapping[str, Any], second: Mapping[str, Any]) -> Batch:
    """Another sample: a number that few sizes of a model have."""

    def both(key: str) -> Any:
        one, other = first[key], second[key]
        has_samples = isinstance(one, Tensor) and one.dim() > 0 and len(one) == 2
        return torch.cat([one, other[:1]]) if has_samples else one

    return {key: both(key) for key in first}


def _run(model: nn.Module, batch: Batch) -> list[Tensor]:
    """All tensors of the outputs."""
    with without_caches(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of what a model draws outside of its layers
        outputs = call_model(model, batch)
    values = outputs.items() if isinstance(outputs, Mapping) else enumerate(_as_tuple(outputs))
    return [tensor for key, value in values if key != "past_key_values" for _, tensor in tensors_in(_plain(value))]


def _as_tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _plain(value: Any) -> Any:
    """Outputs within outputs, as dicts."""
    return {key: _plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _is_close(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    return torch.allclose(first.double(), second.double(), rtol=1e-6, atol=1e-6, equal_nan=True)
