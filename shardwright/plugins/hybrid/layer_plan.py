"""Layers that are given parts of sequences by a model that sees whole ones.

A model is called with its whole batch. What it makes before its layers (embeddings, masks, rotary tables, biases) it
makes for whole sequences, as it always does. Then

    first layer         is given this rank's part, [B, S, H] -> [B, S/n, H]
    traded attention    works on parts; its queries, keys and values are traded by the attention function
    whole module        what looks along a sequence by itself (state spaces, convolutions, attention that a model
                        computes itself): is given whole sequences, gathered, and this rank keeps its part of the result
    last layer          returns its part; where another stack reads it (an encoder's), it is gathered

so that norms, MLPs, the head and the loss work on parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.exchange import Exchange
from ...ops.hooks_inside import in_graph
from ...shardformer.layer.sequence import with_first

Path = tuple[int | str, ...]  # to a tensor: "args" or "kwargs", and on from there; of an output, from the output
Places = dict[Path, int]  # -> the dim of the tensor that is the sequence


@dataclass
class Stack:
    """
    layers      names, in the order in which they run
    gathers     whether what the last one returns is read as whole sequences
    apart       whether that holds of all: each is a stack of its own
    """

    layers: list[str]
    gathers: bool = False
    apart: bool = False

    def is_first(self, index: int) -> bool:
        return self.apart or index == 0

    def gathers_behind(self, index: int) -> bool:
        return self.apart or (self.gathers and index + 1 == len(self.layers))


@dataclass
class LayerPlan:
    """By names of modules.

    extras      what layers are given besides hidden states, for every token: parts of it are handed on
    traded      attention -> which of its arguments are whole and must be parts
    whole       module -> (which of its arguments are parts, which of its results are to be)
    joined      what the last layers return is gathered, and cut behind the inner model, which expects it to be as long
                as what it was given
    unsplit     lists of layers that are computed whole, beside those that are split
    own_masks   a ring needs the masks of the model's own attention function, as its modules do not say that they are
                causal
    """

    stacks: list[Stack] = field(default_factory=list)
    extras: dict[str, Places] = field(default_factory=dict)
    traded: dict[str, Places] = field(default_factory=dict)
    whole: dict[str, tuple[Places, Places]] = field(default_factory=dict)
    joined: bool = False
    unsplit: tuple[str, ...] = ()
    own_masks: bool = False

    def apply(self, model: nn.Module, exchange: Exchange, by_rows: bool) -> None:
        """
        by_rows     attention takes biases by relative position of this rank's queries; else of whole sequences
        """
        for stack in self.stacks:
            for index, name in enumerate(stack.layers):
                layer, extras = model.get_submodule(name), self.extras.get(name, {})
                if stack.is_first(index) or extras:
                    hook = partial(_part_inputs, exchange, extras, stack.is_first(index))
                    layer.register_forward_pre_hook(hook, with_kwargs=True)
                if stack.gathers_behind(index) or (self.joined and index + 1 == len(stack.layers)):
                    layer.register_forward_hook(partial(_gather_first, exchange), prepend=True)
        inner: nn.Module = getattr(model, "base_model", model)  # type: ignore[assignment]
        if self.joined:
            inner.register_forward_hook(partial(_part_states, exchange))
        if inner is not model:
            inner.register_forward_hook(partial(_gather_routers, exchange), with_kwargs=True)
        for name, places in self.traded.items():
            module: Any = model.get_submodule(name)
            _tell_lengths(module, exchange)
            hook = in_graph(partial(_part_arguments, exchange, places), places)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            if hasattr(module, "compute_bias"):
                make = _bias_of_rows if by_rows else _whole_bias
                module.compute_bias = partial(make, module.compute_bias, exchange)
        for name, (given, returned) in self.whole.items():
            module = model.get_submodule(name)
            _tell_lengths(module, exchange)
            hook = in_graph(partial(_gather_inputs, exchange, given), given)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            module.register_forward_hook(in_graph(partial(_part_outputs, exchange, returned), returned))


def _tell_lengths(module: Any, exchange: Exchange) -> None:
    """To graphs that the module is in, see `ops.layer_graphs`."""
    module.split_length, module.key_length = exchange.true_length, exchange.true_keys


def _part_inputs(
    exchange: Exchange, places: Places, hidden: bool, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if hidden:
        args, kwargs = with_first(exchange.part_of_states, args, kwargs)
    return changed_inputs(args, kwargs, places, exchange.part)


def _part_arguments(
    exchange: Exchange, places: Places, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    cut: list[int] = []

    def part(x: Tensor, dim: int) -> Tensor:
        cut.append(x.shape[dim])
        return exchange.part(x, dim)

    args, kwargs = changed_inputs(args, kwargs, places, part)
    exchange.note_keys(attention, cut)
    return args, kwargs


def _gather_inputs(
    exchange: Exchange, places: Places, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return changed_inputs(args, kwargs, places, exchange.gather)


def _part_outputs(exchange: Exchange, places: Places, _: nn.Module, args: Any, output: Any) -> Any:
    return changed(output, places, exchange.part)


def _gather_first(exchange: Exchange, _: nn.Module, args: Any, output: Any) -> Any:
    return changed(output, {() if isinstance(output, Tensor) else (0,): 1}, exchange.gather)


def _part_states(exchange: Exchange, _: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple | Tensor):
        return changed(output, {() if isinstance(output, Tensor) else (0,): 1}, exchange.part)
    output.last_hidden_state = exchange.part(output.last_hidden_state)
    return output


def _gather_routers(
    exchange: Exchange, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    """Router losses are no sums over tokens: every rank computes them from the logits of all."""
    logits = getattr(output, "router_logits", None)
    if logits is None:
        return
    samples = next(value for _, value in tensors_in((args, kwargs))).shape[0]

    def of_all(each: Tensor) -> Tensor:
        if each.dim() > 2:
            return exchange.gather(each)
        return exchange.gather(each.unflatten(0, (samples, -1))).flatten(0, 1)

    output.router_logits = tuple(map(of_all, logits))


def _whole_bias(compute: Callable[..., Tensor], exchange: Exchange, queries: int, keys: int, **options: Any) -> Tensor:
    return compute(exchange.whole_length(queries), exchange.whole_length(keys), **options)


def _bias_of_rows(
    compute: Callable[..., Tensor], exchange: Exchange, queries: int, keys: int, **options: Any
) -> Tensor:
    spans = exchange.spans(queries * exchange.ranks)
    rows = [
        compute(stop - start, exchange.whole_length(keys), **{**options, "past_seen_tokens": start})
        for start, stop in spans
    ]
    return torch.cat(rows, -2)


# Tensors among arguments and results.


def changed_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], places: Places, change: Callable[[Tensor, int], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    both = changed({"args": args, "kwargs": dict(kwargs)}, places, change)
    return both["args"], both["kwargs"]


def changed(value: Any, places: Places, change: Callable[[Tensor, int], Tensor]) -> Any:
    """`value` with other tensors at `places`, as far as there are any."""
    for path, dim in places.items():
        value = _changed_at(value, path, partial(_along, change, dim))
    return value


def _along(change: Callable[[Tensor, int], Tensor], dim: int, x: Tensor) -> Tensor:
    return change(x, dim)


def _changed_at(value: Any, path: Path, change: Callable[[Tensor], Tensor]) -> Any:
    if not path:
        return change(value) if isinstance(value, Tensor) else value
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: _changed_at(value[key], tuple(rest), change)} if key in value else value
    if not isinstance(value, tuple | list) or not isinstance(key, int) or key >= len(value):
        return value
    made = [*value[:key], _changed_at(value[key], tuple(rest), change), *value[key + 1 :]]
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


def tensors_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """All tensors of nested tuples, lists and dicts, with the way to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for index, each in enumerate(value):
            yield from tensors_in(each, (*path, index))
    elif type(value) is dict:
        for key, each in value.items():
            yield from tensors_in(each, (*path, key))
