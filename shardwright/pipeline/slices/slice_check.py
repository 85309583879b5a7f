"""Whether a model's sequences can be cut: its attention looks back only, and all that a layer knows of earlier tokens
are keys and values.

A copy without data runs two slices of an example. Every layer must keep keys and values of each slice once, and return
the slice's tokens on dim 1 of what is read behind the layers. Layers that know of earlier tokens otherwise
(convolutions, recurrences) show there. What only numbers show (attention that looks ahead, positions that are counted
from the tokens) is tried on a small model that is like this one: slices of a padded batch must give what the whole
gives. Where no small one can be built, every layer has to say that it looks back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ...models.config import config_of, is_encoder_decoder, text_config
from ...models.dry_run import forward_defaults, meta_copy, weight_sharing_copy, without_data
from ...models.layer_chain import are_shared, find_units
from ...utils import pytree
from ...utils.tensors import map_tensors
from ..batch.microbatch import batch_size
from ..cut.partition import chain_attention, layer_costs
from ..cut.survey import Survey
from .past_keys import Past
from .sequence_slices import SliceRule

_FAR = 1_000_000  # tokens, beside which windows are nothing
_CLOSE = 1e-4  # relative; models compute parts in single precision
_ENDS = (5, 8, 13)  # of the slices that are tried
_FOLLOW_LENGTH = {"dynamic", "longrope"}  # rotary positions that do


def slice_rule(
    model: nn.Module, survey: Survey, count: int, probes: Callable[[], Iterable[nn.Module]] = tuple
) -> SliceRule:
    """How sequences are cut; ValueError for a model whose sequences cannot be. probes: see `plan_cut`."""
    costs = layer_costs(model, survey)
    per_key = sum(chain_attention(model, survey, _FAR)) / _FAR
    return _Check(model, survey, SliceRule.of(model, count, sum(costs), 2 * per_key)).run(probes)


class _Check:
    def __init__(self, model: nn.Module, survey: Survey, rule: SliceRule) -> None:
        self._model, self._name, self._survey, self._rule = model, type(model).__name__, survey, rule

    def run(self, probes: Callable[[], Iterable[nn.Module]]) -> SliceRule:
        if are_shared(self._survey.units):
            raise self._refusal("it applies the same layer several times, whose keys are not told apart")
        self._refuse_from_outside()
        fits = self._run_slices()
        if not self._try_numbers(probes):
            for unit in self._survey.units:
                if not any(
                    getattr(module, "is_causal", False) is True
                    for module in self._model.get_submodule(unit.layer).modules()
                ):
                    raise self._refusal(
                        f"whether {unit.layer} looks at earlier tokens only is not known: no module in it says so "
                        "(is_causal=True), and no small copy of the model could be built to try"
                    )
        joined = []
        for place in self._survey.boundary(self._survey.num_units):
            for number, fit in enumerate(fits[place]):
                if not fit and (place, number) in self._survey.tail_reads:
                    raise self._refusal(
                        f"what lies behind the layers reads output {number} of {self._survey.units[place].gate}, which "
                        "is not [samples, tokens, ...]"
                    )
                joined.append(fit)
        return replace(self._rule, joined=tuple(joined))

    def _refuse_from_outside(self) -> None:
        if is_encoder_decoder(self._model):
            raise self._refusal("its encoder looks at the whole sequence at once")
        for name in ("vision_config", "audio_config"):
            if getattr(config_of(self._model), name, None) is not None:
                raise self._refusal(
                    f"it takes more than text ({name}), and which slice an image or a sound belongs to is not known"
                )
        parameters = inspect.signature(self._model.forward).parameters
        # a wrapper, perhaps
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        if "past_key_values" not in parameters and not takes_any:
            raise self._refusal("its forward takes no past_key_values, by which attention would see the slices before")
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
                raise self._refusal(
                    f"{name} counts positions from the tokens that are no padding, of which a slice knows its own only"
                )
            if kinds := _kinds_of_positions(module) & _FOLLOW_LENGTH:
                raise self._refusal(
                    f"the rotary positions of {name} follow the length of what it is given "
                    f"(rope_type={sorted(kinds)[0]!r}), and slices are shorter"
                )
        for unit in self._survey.units:
            for name, module in self._model.get_submodule(unit.layer).named_modules(prefix=unit.layer):
                if getattr(module, "is_causal", True) is False:
                    raise self._refusal(f"the attention of {name} looks ahead (is_causal=False)")
        for number, template in enumerate(self._survey.templates):
            if template.num_numbers:
                raise self._refusal(
                    f"{self._survey.units[number].gate} returns numbers beside tensors, and those of slices cannot be "
                    "joined"
                )

    # Without data.

    def _run_slices(self) -> list[list[bool]]:
        """Of every unit and tensor that it returns, whether it is [samples, tokens, ...]."""
        has_weights = not any(parameter.is_meta for parameter in self._model.parameters())
        try:
            return self._run_copy(meta_copy(self._model), on_meta=True)
        except _Refusal:
            raise
        except Exception as error:  # the model's own code: it may need data, or a cache of its own
            failure = error
        if has_weights and isinstance(failure, NotImplementedError | RuntimeError):
            try:
                with torch.random.fork_rng(devices=[]):
                    return self._run_copy(weight_sharing_copy(self._model), on_meta=False)
            except _Refusal:
                raise
            except Exception as error:
                failure = error
        reason = str(failure).splitlines()[0] if str(failure) else ""
        raise self._refusal(f"it did not run on a part of a sequence ({type(failure).__name__}: {reason})") from failure

    def _run_copy(self, copied: nn.Module, on_meta: bool) -> list[list[bool]]:
        example = self._survey.example
        example = map_tensors(lambda tensor: tensor.to("meta"), example) if on_meta else example
        length = self._rule.length(example)
        if length < 3:
            raise self._refusal(
                f"the example batch has sequences of {length} tokens; pass a longer one as example_inputs="
            )
        ends = [length // 2 + 1, length]  # slices of unequal lengths, which no other size can be both of
        fits: list[list[bool]] = [[] for _ in self._survey.units]
        past = Past(length)
        parts = map_tensors(torch.Tensor.clone, self._rule.cut(example, ends))
        for part, (start, end) in zip(parts, pairwise([0, *ends]), strict=True):
            before = past.before(start)
            handles = [
                copied.get_submodule(unit.gate).register_forward_hook(
                    _looking(fits[number], (batch_size(part), end - start))
                )
                for number, unit in enumerate(self._survey.units)
            ]
            asked = [0]
            count = _counting(before.updated, asked)
            handles += [copied.get_submodule(unit.gate).register_forward_hook(count) for unit in self._survey.units]
            handles.append(copied.get_submodule(self._survey.units[-1].gate).register_forward_hook(_leave))
            try:
                with without_data() if on_meta else nullcontext(), torch.no_grad():
                    copied(**{**forward_defaults(copied), **part, "past_key_values": before})
            except _Reached:
                pass
            finally:
                for handle in handles:
                    handle.remove()
            self._check_updates(asked, before.updated)
        return fits

    def _check_updates(self, asked: list[int], updated: list[int]) -> None:
        for unit, (low, high) in zip(self._survey.units, pairwise(asked), strict=True):
            if high - low != 1:
                raise self._refusal(
                    f"{unit.layer} keeps keys and values {high - low} times in a forward, not once: what it knows of "
                    "earlier tokens is something else (a convolution, a recurrence, another layer's keys)"
                )
        if len(set(updated)) != len(updated):
            raise self._refusal(f"several layers keep their keys under one number ({updated})")

    # With numbers.

    def _try_numbers(self, probes: Callable[[], Iterable[nn.Module]]) -> bool:
        """Refuse a model whose small likeness gives other numbers in slices; whether there was one."""
        lists = list(dict.fromkeys(unit.layer.rpartition(".")[0] for unit in self._survey.units))
        for probe in probes():
            try:
                gate = find_units(probe, lists)[-1].gate
                whole = [(mask, _outputs(probe, gate, mask, (_ENDS[-1],))) for mask in _masks()]
            except Exception:  # a narrow copy of foreign code may run on nothing
                continue
            for mask, expected in whole:
                try:
                    found = _outputs(probe, gate, mask, _ENDS)
                except Exception as error:
                    reason = str(error).splitlines()[0] if str(error) else ""
                    raise self._refusal(
                        f"a small copy of it did not run on slices ({type(error).__name__}: {reason})"
                    ) from error
                seen = (mask.bool() if mask is not None else torch.ones(expected.shape[:2], dtype=torch.bool))[
                    ..., None
                ]
                seen = seen & expected.isfinite()  # plain transformers has NaN for some paddings, too
                error_of = torch.where(seen, expected - found, 0.0).nan_to_num(nan=torch.inf).abs().max()
                if error_of > _CLOSE * torch.where(seen, expected, 0.0).abs().max():
                    raise self._refusal(
                        f"slices of a{' padded' if mask is not None else ''} batch do not give what the whole gives "
                        "(tried on a small copy): its attention looks ahead, or it counts or mixes tokens in another "
                        "way than by attention"
                    )
            return True
        return False

    def _refusal(self, why: str) -> ValueError:
        return _Refusal(
            f"num_sequence_slices={self._rule.count}: sequences of {self._name} cannot be cut, since {why}; use "
            "num_sequence_slices=1 (fewer samples in a microbatch, activation checkpointing and offload_activations "
            "make room for long sequences of any model)"
        )


def _kinds_of_positions(module: nn.Module) -> set[str]:
    """`rope_type` of a module, one or one for each type of layer."""
    found = getattr(module, "rope_type", None)
    return {kind for kind in (found.values() if isinstance(found, Mapping) else [found]) if isinstance(kind, str)}


class _Refusal(ValueError):
    pass


class _Reached(Exception):
    """Leaves a forward behind the last layer."""


def _leave(*_: Any) -> None:
    raise _Reached


def _looking(fits: list[bool], shape: tuple[int, int]) -> Callable[..., None]:
    """A hook that notes in `fits`, of every tensor that a module returns, whether it begins with this shape, as it
    did before.
    """

    def look(module: nn.Module, args: Any, output: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        before = list(fits) or [True] * len(tensors)
        fits[:] = [fit and tuple(tensor.shape[:2]) == shape for fit, tensor in zip(before, tensors, strict=True)]

    return look


def _counting(updated: list[int], asked: list[int]) -> Callable[..., None]:
    return lambda *_: asked.append(len(updated))


def _masks() -> list[torch.Tensor | None]:
    """Without padding, and with padding behind and in front, more than a slice of it."""
    mask = torch.ones(3, _ENDS[-1], dtype=torch.long)
    mask[0, -6:], mask[1, :6] = 0, 0
    return [None, mask]


def _outputs(probe: nn.Module, gate: str, mask: torch.Tensor | None, ends: tuple[int, ...]) -> torch.Tensor:
    """What the last layer returns for a batch that comes in slices with these ends."""
    config = text_config(probe)
    words, padding = config.vocab_size, getattr(config, "pad_token_id", None)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(words // 2, words, (3, ends[-1]), generator=generator)
    ids = (
        ids
        if mask is None
        else ids.masked_fill(mask == 0, padding if isinstance(padding, int) and 0 <= padding < words else 0)
    )
    seen: list[torch.Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)))
        raise _Reached

    handle = probe.get_submodule(gate).register_forward_hook(note)
    past = Past(ends[-1])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for start, end in pairwise([0, *ends]):
                given: Mapping[str, Any] = {} if mask is None else {"attention_mask": mask[:, :end]}
                before = {"past_key_values": past.before(start)} if len(ends) > 1 else {}
                with suppress(_Reached):
                    probe(ids[:, start:end], **{**forward_defaults(probe), **given, **before})
    finally:
        handle.remove()
    return torch.cat(seen, 1)
