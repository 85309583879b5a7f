"""Sequence parallelism along the ranks of tensor parallelism: which modules gather, scatter and split.

Outside of regions every rank of plain tensor parallelism computes the same: norms, dropout, sums of residuals. Here
each does so for its part of the sequence. A region gathers where it opens and scatters where it closes, which together
are the bytes of the all-reduce that they stand for. What the layers are given is split at the first of them, and what
they return gathered behind the last: masks and positions are made before, from whole lengths.

One pass over the modules of the layers says what becomes of each (`plan_sequence`); what it does not know is computed
whole. That it is right is not assumed: a small copy is tried (`SelfCheck`).

Parameters that are applied to parts of sequences (norms between regions, biases behind row linears) have gradients that
are parts of a sum, which their `ParamSpec` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.nn as nn
from torch import Tensor

from ..models.layer_chain import find_units
from .adapters import has_adapters
from .layer.linear import is_linear
from .layer.parallel_module import ParallelGroup
from .layer.sequence import DrawsAlike, GatheringColumn, GatheringModule, ScatteringRow, SplitLayer, Stack, WholeModule
from .regions import Region, is_within
from .rng import uses_dropout
from .styles import Column, Decision, PartialGradient, Replicated, Site
from .sum_at_exit import SumAtExit


@dataclass(frozen=True)
class AlongTensor:
    """How sequences are split over the ranks of tensor parallelism.

    again   column linears keep this rank's part of their input and gather it once more in backward
    ring    collectives and the products beside them run in parts, in turns (`ops.sequence_ring`)
    """

    again: bool = False
    ring: bool = False


@dataclass(frozen=True)
class Way:
    """
    careful     compute all regions whole and split what they return
    trusting    give parts to modules of which nothing is known, in which nothing is sharded and no convolution is, and
                split all that whole modules return
    returning   regions return parameters of their own, which are applied to parts behind them
    streams     layers are given several streams of hidden states, in a dim before that of samples
    alone       every layer is given whole sequences and returns whole ones: a model leaves some of them out, or reads
                or changes what is between them
    """

    careful: bool = False
    trusting: bool = False
    returning: bool = False
    streams: bool = False
    alone: bool = False


@dataclass
class SequencePlan:
    """What becomes of the modules of a model, by name.

    stacks      lists of layers -> their layers
    of_stack    module -> list that it is in, for all below
    gathering   modules that gather what they are given -> the column linears that read it
    columns     column linears that gather what they are given
    rows        row linears that scatter what they return -> whether tokens in one dim come by rank
    sums        blocks that sum at their exit
    whole       modules that every rank computes alike
    partial     parameters that are applied to parts of sequences
    dim         along which layers have positions
    alone       whether every layer splits what it is given, and gathers what it returns
    every       whether whole modules split all that they return, and not hidden states alone
    trains      whether any of these is trained, known when the plan has been applied
    """

    stacks: dict[str, list[str]] = field(default_factory=dict)
    of_stack: dict[str, str] = field(default_factory=dict)
    gathering: dict[str, tuple[str, ...]] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    rows: dict[str, bool] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    whole: list[str] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    dim: int = 1
    alone: bool = False
    every: bool = False
    trains: bool = True

    def decisions(self, model: nn.Module, decided: Sequence[Decision]) -> list[Decision]:
        """What was decided, with gradients that are parts of a sum."""
        partial = {id(model.get_parameter(name)): name for name in self.partial}
        changed = []
        for decision in decided:
            specs = dict(decision.specs)
            for name, spec in specs.items():
                if partial.pop(id(decision.site.module.get_parameter(name)), None) is not None:
                    specs[name] = replace(spec, partial=("tp",))
            changed.append(replace(decision, specs=specs))
        parallel = decided[0].site.parallel
        for name in partial.values():
            owner, _, local = name.rpartition(".")
            site = Site(name, model.get_submodule(owner), local, model.get_submodule(owner), parallel)
            style = PartialGradient()
            changed.append(Decision("sequence parallelism", style, site, style.specs(site)))
        return changed

    def for_dropout(self, regions: Sequence[Region]) -> list[Region]:
        """Those whose random numbers are theirs alone: others are part of what a layer draws."""
        within = (*self.sums, *self.whole)
        own = {*self.stacks, *self.of_stack}
        return [
            region
            for region in regions
            if any(is_within(region.name, name) for name in within)
            or not any(is_within(region.name, name) for name in own)
        ]

    def apply(self, model: nn.Module, parallel: ParallelGroup, how: AlongTensor) -> None:
        """After the decisions were: `model` is sharded."""
        self.trains = any(model.get_parameter(name).requires_grad for name in self.partial)
        stacks = {name: Stack(name, how.again, how.ring, self.trains, self.dim) for name in self.stacks}

        def of(name: str) -> Stack:
            return stacks[self.of_stack[name]]

        for name, readers in self.gathering.items():
            modules = tuple(model.get_submodule(reader) for reader in readers)
            GatheringModule.of(model.get_submodule(name), parallel, of(name), modules)
        for name in self.columns:
            GatheringColumn.adopt(model.get_submodule(name), parallel).stack = of(name)
        for name, by_rank in self.rows.items():
            row = ScatteringRow.adopt(model.get_submodule(name), parallel)
            row.stack, row.by_rank = of(name), by_rank
        for name in self.sums:
            model.get_submodule(name).stack = of(name)  # type: ignore[assignment]
        for name in self.whole:
            whole = WholeModule.adopt(model.get_submodule(name), parallel)
            whole.stack, whole.every = of(name), self.every
        for name in (*self.sums, *self.whole):
            if uses_dropout(model.get_submodule(name)):
                DrawsAlike.adopt(model.get_submodule(name), parallel)
        for name, layers in self.stacks.items():
            for layer in layers:
                first, last = self.alone or layer == layers[0], self.alone or layer == layers[-1]
                SplitLayer.of(model.get_submodule(layer), parallel, stacks[name], first, last)


def plan_sequence(
    model: nn.Module,
    decisions: Sequence[Decision],
    regions: Sequence[Region],
    lists: Sequence[str] | None,
    way: Way = Way(),
) -> SequencePlan:
    """
    lists       names of the lists of layers that sequences go through; None: they are found
    """
    plan = SequencePlan(dim=2 if way.streams else 1, alone=way.alone, every=way.trusting)
    for layer in dict.fromkeys(unit.layer for unit in find_units(model, lists)):
        plan.stacks.setdefault(layer.rpartition(".")[0], []).append(layer)
    walk = _Walk(model, decisions, regions, plan, way)
    for name, layers in plan.stacks.items():
        for layer in layers:
            walk.layer(layer, name)
    seen: set[int] = set()
    unique = []
    for name in plan.partial:
        param = model.get_parameter(name)
        if id(param) not in seen:
            unique.append(name)
        seen.add(id(param))
    plan.partial = unique
    return plan


class _Walk:
    """Goes down from each layer to what sees whole sequences."""

    def __init__(
        self,
        model: nn.Module,
        decisions: Sequence[Decision],
        regions: Sequence[Region],
        plan: SequencePlan,
        way: Way,
    ) -> None:
        self._model, self._plan, self._way = model, plan, way
        self._names = {id(module): name for name, module in model.named_modules()}
        self._visited: set[str] = set()
        self._regions = {
            region.name: region
            for region in regions
            if (region.opens or region.closes) and region.opens != (region.module,)
        }
        self._alone = [region.name for region in regions if region.opens == (region.module,)]
        self._sums = {decision.site.name for decision in decisions if isinstance(decision.style, SumAtExit)}
        self._columns = [
            decision.site.name
            for decision in decisions
            if isinstance(decision.style, Column) and decision.style.gather_output
        ]
        self._sharded = [
            decision.site.name
            for decision in decisions
            if any(spec.is_sharded or spec.partial for spec in decision.specs.values())
            or not isinstance(decision.style, Replicated | PartialGradient)
        ]
        self._taken = {
            id(decision.site.module.get_parameter(name))
            for decision in decisions
            for name, spec in decision.specs.items()
            if spec.is_sharded or spec.partial
        }

    def layer(self, name: str, stack: str) -> None:
        self._stack = stack
        self._open(name, self._model.get_submodule(name))

    def _visit(self, name: str, module: nn.Module) -> None:
        plan, region = self._plan, self._regions.get(name)
        inner = [other for other in self._regions if other != name and is_within(other, name)]
        if name in self._sums:
            self._put(name)
            plan.sums.append(name)
        elif any(is_within(other, name) for other in self._alone) and not any(
            is_within(other, name) for other in self._sums
        ):
            self._compute_whole(name)
        elif region is not None and not inner and (region.opens or self._gathered_columns(name)):
            if self._way.careful:
                self._compute_whole(name)
            else:
                self._gather(name, region)
        elif region is not None and region.closes and inner and not any(self._regions[other].closes for other in inner):
            self._compute_whole(name)  # a mixer whose parts open by themselves: it views what they return as whole
        elif region is not None and region.closes and not region.opens and inner and self._gathered_columns(name):
            self._compute_whole(name)  # a row linear between a gathered column and parts that close by themselves
        elif self._way.trusting and region is not None and region.closes and not region.opens and not inner:
            self._compute_whole(name)  # whose row linears are given whole features
        elif self._way.careful and region is None and inner and self._gathers_alone(name, inner):
            self._compute_whole(name)  # whose linears are in modules of their own
        elif region is not None or inner or any(is_within(other, name) for other in self._sums):
            self._open(name, module)
        elif any(is_within(other, name) for other in self._sharded) or not self._takes_parts(module):
            self._compute_whole(name)
        else:
            self._note_partial(name, module)

    def _takes_parts(self, module: nn.Module) -> bool:
        convolves = any(isinstance(part, nn.Conv1d) for part in module.modules())
        return is_by_token(module) or (self._way.trusting and not convolves)

    def _open(self, name: str, module: nn.Module) -> None:
        """A module whose own forward sees parts of sequences."""
        plan, region = self._plan, self._regions.get(name)
        edges = {} if region is None else {id(edge): edge for edge in (*region.opens, *region.closes)}
        for local, param in module.named_parameters(recurse=False):
            self._note(f"{name}.{local}", param)
        for child in module.children():
            below = self._names[id(child)]  # the same wherever it is, and once: layers may share a block (Zamba 2)
            if below in self._visited:
                continue
            self._visited.add(below)
            own = [edge for edge in edges.values() if is_within(self._names[id(edge)], below)]
            if not own:
                self._visit(below, child)
                continue
            for edge in own:
                self._put(self._names[id(edge)])
                if region is not None and edge in region.opens:
                    plan.columns.append(self._names[id(edge)])
                else:
                    plan.rows[self._names[id(edge)]] = bool(region and region.opens)
            self._note_partial(below, child)

    def _gather(self, name: str, region: Region) -> None:
        plan = self._plan
        self._put(name)
        opens = [self._names[id(module)] for module in region.opens]
        plan.gathering[name] = (*opens, *self._gathered_columns(name))
        if self._way.returning:
            for local, param in region.module.named_parameters(recurse=False):
                self._note(f"{name}.{local}", param)
        for row in region.closes:
            self._put(self._names[id(row)])
            plan.rows[self._names[id(row)]] = False
            wrapper = self._wrapper(self._names[id(row)])
            # Behind what has been scattered: the bias, and LoRA's B.
            self._note_partial(*(wrapper if wrapper is not None else (self._names[id(row)], row)))

    def _gathers_alone(self, name: str, inner: list[str]) -> bool:
        """Whether all that a module reads in parts of features is whole again before its own forward sees it."""
        return bool(self._gathered_columns(name)) and not any(self._regions[other].opens for other in inner)

    def _gathered_columns(self, name: str) -> list[str]:
        """Column linears of a region whose features are gathered behind them (norms over all heads)."""
        return [column for column in self._columns if is_within(column, name)]

    def _wrapper(self, name: str) -> tuple[str, nn.Module] | None:
        parts = name.split(".")
        for length in (len(parts) - 1, len(parts) - 2):
            around = ".".join(parts[:length])
            if has_adapters(self._model.get_submodule(around)):
                return around, self._model.get_submodule(around)
        return None

    def _compute_whole(self, name: str) -> None:
        self._put(name)
        self._plan.whole.append(name)

    def _put(self, name: str) -> None:
        self._plan.of_stack[name] = self._stack

    def _note_partial(self, name: str, module: nn.Module) -> None:
        for local, param in module.named_parameters():
            self._note(f"{name}.{local}", param)

    def _note(self, name: str, param: nn.Parameter) -> None:
        if id(param) not in self._taken:
            self._plan.partial.append(name)


def is_by_token(module: nn.Module) -> bool:
    """Whether a module that nothing is sharded in computes every position for itself, as far as one can tell: linears,
    norms, dropouts and activations, one after the other.
    """
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return all(is_by_token(child) for child in module.children())
    if is_linear(module):
        return True
    return not any(True for _ in module.children()) and all(param.ndim <= 1 for param in module.parameters())


def split_lengths(batch: object, stacks: Sequence[str]) -> Mapping[str, int]:
    """How long the sequences of a batch are in each list of layers, as far as it tells."""
    return dict(_lengths(batch, stacks))


def _lengths(batch: object, stacks: Sequence[str]) -> Iterator[tuple[str, int]]:
    for number, name in enumerate(stacks):
        decodes = len(stacks) > 1 and number == len(stacks) - 1
        keys = ("decoder_input_ids", "decoder_inputs_embeds", "labels") if decodes else ("input_ids", "inputs_embeds")
        found: Any = None
        if isinstance(batch, Mapping):
            found = next((batch[key] for key in keys if batch.get(key) is not None), None)
        elif not decodes:
            found = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if isinstance(found, Tensor) and found.dim() >= 2:
            yield name, found.shape[1]
