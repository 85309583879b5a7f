"""Whether a model's sequences can be cut: its attention looks back only, and all that a layer knows of earlier tokens are keys and values.

A copy without data runs two slices of an example. Every layer must keep keys and values of each slice once, and return what has the
slice's tokens on dim 1. Layers that know of earlier tokens otherwise (convolutions, recurrences) and attention that looks ahead are
refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..models.dry_run import forward_defaults, meta_copy, without_data
from ..utils import pytree
from ..utils.tensors import map_tensors
from .microbatch import Batch, batch_size, items_of
from .partition import attention_costs, layer_costs, text_config
from .past_keys import Past
from .sequence_slices import SliceRule
from .survey import Survey

_FAR = 1_000_000  # tokens, beside which windows are nothing


def slice_rule(model: nn.Module, survey: Survey, count: int) -> SliceRule:
    """How sequences are cut; ValueError for a model whose sequences cannot be."""
    costs = layer_costs(model, survey)
    per_key = sum(attention_costs(model, survey.num_units, _FAR)) / _FAR
    rule = SliceRule.of(model, count, sum(costs), 2 * per_key)
    _Check(model, survey, rule).run()
    return rule


class _Check:
    def __init__(self, model: nn.Module, survey: Survey, rule: SliceRule) -> None:
        self._name, self._survey, self._rule = type(model).__name__, survey, rule
        self._refuse_from_outside(model)
        self._model = meta_copy(model)

    def run(self) -> None:
        example = map_tensors(lambda tensor: tensor.to("meta"), self._survey.example)
        length = self._rule.length(example)
        if length < 2:
            raise self._refusal("the example batch has sequences of one token; pass a longer one as example_inputs=")
        ends = [length // 2 + length % 2, length]
        past, start = Past(length), 0
        for part, end in zip(self._rule.cut(example, ends), ends, strict=True):
            self._run_slice(part, past, start, end)
            start = end

    def _refuse_from_outside(self, model: nn.Module) -> None:
        config = text_config(model)
        if getattr(config, "is_encoder_decoder", False):
            raise self._refusal("its encoder looks at the whole sequence at once")
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())  # a wrapper, perhaps
        if "past_key_values" not in parameters and not takes_any:
            raise self._refusal("its forward takes no past_key_values, by which attention would see the slices before")
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding) and "position" in name and module.padding_idx is not None:
                raise self._refusal(f"{name} counts positions from the tokens that are no padding, of which a slice knows its own only")
        for unit in self._survey.units:
            for name, module in model.get_submodule(unit.layer).named_modules(prefix=unit.layer):
                if getattr(module, "is_causal", True) is False:
                    raise self._refusal(f"the attention of {name} looks ahead (is_causal=False)")
        for number, template in enumerate(self._survey.templates):
            if template.num_numbers:
                raise self._refusal(
                    f"{self._survey.units[number].gate} returns numbers beside tensors, and those of slices cannot be joined"
                )

    def _run_slice(self, part: Batch, past: Past, start: int, end: int) -> None:
        before = past.before(start)
        samples = batch_size(part)
        asked: dict[int, int] = {}

        def leave(unit: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                asked[unit] = len(before.updated) - sum(asked.values())
                for leaf in pytree.tree_leaves(output):
                    if isinstance(leaf, torch.Tensor) and tuple(leaf.shape[:2]) != (samples, end - start):
                        raise self._refusal(
                            f"{self._survey.units[unit].gate} returns a tensor of shape {list(leaf.shape)} for a slice of {samples} "
                            f"samples and {end - start} tokens; [samples, tokens, ...] can be cut"
                        )

            return hook

        handles = [
            self._model.get_submodule(unit.gate).register_forward_hook(leave(number)) for number, unit in enumerate(self._survey.units)
        ]
        try:
            with without_data(), torch.no_grad():
                _call(self._model, part, {**forward_defaults(self._model), "past_key_values": before})
        except _Refusal:
            raise
        except Exception as error:  # the model's own code, with a cache that is not its own
            reason = str(error).splitlines()[0] if str(error) else ""
            raise self._refusal(f"it did not run on a part of a sequence ({type(error).__name__}: {reason})") from error
        finally:
            for handle in handles:
                handle.remove()
        for number, times in asked.items():
            if times != 1:
                raise self._refusal(
                    f"{self._survey.units[number].layer} keeps keys and values {times} times in a forward, not once: what it knows of "
                    "earlier tokens is something else (a convolution, a recurrence, another layer's keys)"
                )
        if len(set(before.updated)) != len(before.updated):
            raise self._refusal(f"several layers keep their keys under one number ({before.updated})")

    def _refusal(self, why: str) -> ValueError:
        return _Refusal(
            f"num_sequence_slices={self._rule.count}: sequences of {self._name} cannot be cut, since {why}; use num_sequence_slices=1 "
            "(fewer samples in a microbatch, activation checkpointing and offload_activations make room for long sequences of any model)"
        )


class _Refusal(ValueError):
    pass


def _call(model: nn.Module, batch: Batch, given: dict[str, Any]) -> None:
    if isinstance(batch, Mapping):
        model(**{**given, **batch})
    else:
        model(*(value for _, value in items_of(batch)), **given)
