"""The chain through a model of several towers: their layers, too, in the order in which they run.

A tower is a part of the model with a config of its own (vision and text of LLaVA, both sides of CLIP, image encoder and
mask decoder of SAM). Which of them runs first, and whether a batch reaches it at all, is seen in a dry run.

    LLaVA     vision.0, ..., vision.n, text.0, ..., text.m      the first text layer reads vision.(n - 1)
    CLIP      vision.0, ..., vision.n, text.0, ..., text.m      what lies behind them reads vision.n and text.m
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from ...models.layer_chain import Unit, applied, are_shared, find_units, layer_lists
from ...utils.objects import is_cache, tensors_within


def list_of(unit: Unit) -> str:
    """Name of the list that the unit's layer is in."""
    return unit.layer.rpartition(".")[0]


class CutError(ValueError):
    """The model ran, but it cannot be cut."""


class OtherOrder(Exception):
    """Layers ran otherwise than they were asked to; `units` are those that did, in their order."""

    def __init__(self, units: list[Unit]) -> None:
        super().__init__()
        self.units = units


@dataclass(frozen=True)
class Chain:
    """What a model can be cut along.

    main    the layers that every model has; in this order
    towers  lists of other layers, which run before, between or behind them, or not at all
    """

    main: tuple[Unit, ...]
    towers: tuple[tuple[Unit, ...], ...] = ()

    @staticmethod
    def of(model: nn.Module, lists: Sequence[str] | None = None, towers: bool = True) -> Chain:
        """lists: names of the ModuleLists to cut along; then there are no towers besides."""
        main = tuple(find_units(model, lists))
        if lists is not None or not towers or are_shared(main):
            return Chain(main)
        parts = {id(_config_around(model, list_of(unit))) for unit in main}
        found = [
            tuple(Unit(f"{name}.{index}", f"{name}.{index}") for index in range(len(layers)))
            for name, layers in layer_lists(model)
            if id(config := _config_around(model, name)) not in parts and config is not None
        ]
        return Chain(main, tuple(found))

    @property
    def guess(self) -> list[Unit]:
        """The usual order: what looks at images runs before the text."""
        return [unit for units in (*self.towers, self.main) for unit in units]

    def as_run(self, units: Sequence[Unit], name: str) -> list[Unit]:
        """The chain of layers that ran like this; `CutError` where it is none. `name` of the model, for its text."""
        in_main = {unit.layer for unit in self.main}
        own = [unit.layer for unit in units if unit.layer in in_main]
        expected = [unit.layer for unit in self.main]
        if own != expected:
            # Some layers several times, or some of them not at all (of images, in a model of text alone).
            may_differ = {*own} == in_main or own == [layer for layer in expected if layer in own] != []
            if all(unit.layer == unit.gate for unit in self.main) and not are_shared(self.main) and may_differ:
                return applied(own)
            order = [expected.index(layer) for layer in own]
            raise CutError(
                f"{name} cannot be cut into stages: of its layers {expected[0]} to {expected[-1]} "
                + (f"ran {order}, in this order," if own else "none was called as a module,")
                + " and stages need layers that run from first to last, or all of them, some several times; use "
                "pp_size=1"
            )
        towers = {
            unit
            for tower in self.towers
            if [unit for unit in units if list_of(unit) == list_of(tower[0])] == [*tower]
            for unit in tower
        }
        kept = [unit for unit in units if unit.layer in in_main or unit in towers]
        runs = [name for name, _ in groupby(kept, key=list_of)]
        return kept if len(runs) == len(set(runs)) else [*self.main]  # a tower whose layers take turns with others


def refuse_own_backward(name: str) -> None:
    """Called where a layer returns. `CutError` where it runs inside of a `torch.autograd.Function`: that one's backward
    runs the layers again by itself, those of all stages at once.
    """
    if torch.is_grad_enabled():
        return
    frame = inspect.currentframe()
    while frame is not None:
        if any(isinstance(value, FunctionCtx) for value in frame.f_locals.values()):
            raise CutError(
                f"{name} cannot be cut into stages: a torch.autograd.Function runs its layers, forward and backward, "
                "all of them in one piece; use pp_size=1"
            )
        frame = frame.f_back


def refuse_objects(gate: str, leaves: Sequence[Any]) -> None:
    """`CutError` where what a layer returned has tensors in objects, which do not travel."""
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and not is_cache(leaf) and any(True for _ in tensors_within(leaf)):
            raise CutError(
                f"{gate} returns a {type(leaf).__name__} with tensors in it, and between pipeline stages travel "
                "tensors, alone or in tuples, lists, dicts and transformers' outputs; return one of these, or use "
                "pp_size=1"
            )


def _config_around(model: nn.Module, name: str) -> object:
    """The config of the innermost module with one around the module `name`."""
    found = None
    path = ""
    for step in ("", *name.split(".")):
        path = f"{path}.{step}" if path else step
        found = getattr(model.get_submodule(path), "config", found)
    return found
