"""What every part of a model reads: the facts from which stages are cut, learnt from one dry run.

The dry run cuts the model behind every unit, and in front of the first one: a gate's output, and the hidden states that
the first layer receives, go on as fresh leaf tensors. Walking back from each gate's output (and from the model's
output), through the autograd graph and what it leaves out (`Flows`), then tells, unit by unit,

    reads       the units whose outputs it needs: normally the one before; for T5 decoders also the encoder
    parameters  the parameters that take part: its own, and any outside the layers (embeddings before the first layer,
                relative position embeddings that feed every layer, the head after the last)
    modules     the modules outside the layers whose output takes part; the others may be replaced by stubs

A module outside the layers that computes without gradients (fixed position tables) takes part everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import cycle
from typing import Any

import torch
from torch import nn

from ...models.dry_run import forward_defaults, meta_copy, run_dry, weight_sharing_copy
from ...models.example_inputs import example_batches, takes_more_than_text
from ...models.known_values import run_knowing
from ...models.layer_chain import Unit, numbers_by_module, paths_to
from ...utils import pytree
from .chain import Chain, CutError, OtherOrder, list_of, refuse_own_backward
from .entry import ENTRY, Entry, find_place
from .flows import Flows
from .survey import Part, Survey
from .template import TENSOR, Template


def survey_model(
    model: nn.Module, lists: Sequence[str] | None = None, example_inputs: Any = None, towers: bool = True
) -> Survey:
    """Find the layers of `model` and learn what they read.

    `example_inputs` is a batch for models whose inputs cannot be guessed. Of guessed batches further ones are tried as
    long as parts of the model have not run. A model whose forward does not run on the meta device is run once on real
    numbers, if it has its weights. towers: whether the chain goes through them, too.
    """
    chain = Chain.of(model, lists, towers)
    examples = [example_inputs] if example_inputs is not None else list(example_batches(model))
    if chain.towers:
        examples.sort(key=lambda example: -len(_entries(example)))
    failures: list[str] = []
    ways = [_survey_without_numbers, _survey_knowing]
    if not any(parameter.is_meta for parameter in model.parameters()):
        ways.append(_survey_on_numbers)
    found: list[Survey] = []
    for learn in ways:
        for example in examples:
            if found and not _may_tell_more(model, found, example):
                continue
            try:
                found.append(_survey(learn, model, chain, example))
            except CutError:
                if not found:
                    raise
            except Exception as error:  # the model's own code: anything can happen on a guessed batch
                failures.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if found and all(any(unit in one.units for one in found) for tower in chain.towers for unit in tower):
            break
    if found:
        return _together(found)
    raise ValueError(
        f"{type(model).__name__} could not be run on a guessed batch to learn where it can be cut "
        f"({'; '.join(dict.fromkeys(failures))}); pass example_inputs=, a batch like the real ones, to the plugin, or "
        "use pp_size=1"
    )


def _may_tell_more(model: nn.Module, found: Sequence[Survey], example: Any) -> bool:
    """Whether parts of the model that have not run may do so on `example`: one with other entries, or the same one with
    its numbers, where a model looks for places of images before it looks at images.
    """
    if not set.intersection(*(set(one.unread) for one in found)):
        return False
    if _entries(example) not in {_entries(one.example) for one in found}:
        return True
    idle = set(found[0].outside).difference(*(one.ran for one in found))
    return bool(idle) and takes_more_than_text(model, example)


def _entries(example: Any) -> frozenset[str]:
    return frozenset(example) if isinstance(example, dict) else frozenset()


def _together(surveys: Sequence[Survey]) -> Survey:
    """That of the longest chain, with what other runs along the same chain have read besides."""
    longest = max(surveys, key=lambda survey: survey.num_units)
    return reduce(Survey.joined_by, (survey for survey in surveys if survey is not longest), longest)


def _survey(
    learn: Callable[[nn.Module, list[Unit], Any], Survey], model: nn.Module, chain: Chain, example: Any
) -> Survey:
    units = chain.guess
    for _ in range(3):  # in the guessed order, in that of the run, without towers that are torn apart by it
        try:
            return replace(learn(model, units, example), example=example)
        except OtherOrder as other:
            units = chain.as_run(other.units, type(model).__name__)
    raise CutError(
        f"{type(model).__name__} cannot be cut into stages: its layers run in another order in every forward"
    )


def _survey_without_numbers(model: nn.Module, units: list[Unit], example: Any) -> Survey:
    copied = meta_copy(model)
    return _Surveyor(copied, units).run(partial(run_dry, copied, example))


def _survey_knowing(model: nn.Module, units: list[Unit], example: Any) -> Survey:
    copied = meta_copy(model)
    return _Surveyor(copied, units).run(partial(run_knowing, copied, example))


def _survey_on_numbers(model: nn.Module, units: list[Unit], example: Any) -> Survey:
    """Survey a copy that shares the weights' memory and nothing else, on real numbers, without dropout."""
    copied = weight_sharing_copy(model)
    inputs = {**forward_defaults(model), **example} if isinstance(example, dict) else example
    call = partial(copied, **inputs) if isinstance(inputs, dict) else partial(copied, *inputs)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        return _Surveyor(copied, units).run(call)


@dataclass
class _Surveyor:
    """One dry run of `model` with hooks on its gates and on the modules outside its layers."""

    model: nn.Module
    units: list[Unit]
    order: list[int] = field(default_factory=list)
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    passed_on: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    others: dict[int, tuple[pytree.TreeSpec, tuple[Any, ...]]] = field(default_factory=dict)
    leaves: dict[int, int] = field(default_factory=dict)  # id of a fresh leaf -> unit
    # id of a fresh leaf -> its number among the tensors of the unit
    numbers: dict[int, int] = field(default_factory=dict)
    met: set[tuple[int, int]] = field(default_factory=set)  # unit and number of the leaves that the last walk came to
    read: set[tuple[int, int]] = field(default_factory=set)  # the same for all walks
    # place of the entry, the tensor, what goes on instead
    entered: tuple[int | str, torch.Tensor, torch.Tensor] | None = None
    keep: list[torch.Tensor] = field(default_factory=list)  # ids stay valid while the tensors live
    # autograd node -> modules outside that returned its tensor
    produced: dict[Any, set[str]] = field(default_factory=dict)
    beside: dict[int, str] = field(default_factory=dict)  # id of a marker -> module outside that returned its tensor
    early: set[str] = field(default_factory=set)  # modules outside that ran before the first gate
    ran: set[str] = field(default_factory=set)
    # modules outside that compute without gradients: who reads them is unknown
    untracked: set[str] = field(default_factory=set)
    flows: Flows = field(default_factory=Flows)

    def run(self, call: Callable[[], Any]) -> Survey:
        handles = [
            # Before transformers' own hooks that collect hidden states, where a tower's are read later on.
            self.model.get_submodule(gate).register_forward_hook(
                self._gate_hook(numbers), prepend=list_of(self.units[numbers[0]]) != list_of(self.units[-1])
            )
            for gate, numbers in numbers_by_module(unit.gate for unit in self.units).items()
        ]
        first = self.model.get_submodule(self.units[0].layer)
        handles.append(first.register_forward_pre_hook(self._enter, with_kwargs=True))
        outside = self._outside()
        for name in outside:
            handles.append(
                self.model.get_submodule(name).register_forward_hook(self._outside_hook(name), with_kwargs=True)
            )
        try:
            with self.flows:
                output = call()
        finally:
            for handle in handles:
                handle.remove()
        if self.order != list(range(len(self.units))):
            raise OtherOrder([self.units[number] for number in self.order])
        return self._evaluate(
            [leaf for leaf in pytree.tree_leaves(_plain(output)) if isinstance(leaf, torch.Tensor)], outside
        )

    def _outside(self) -> list[str]:
        layers = {unit.layer for unit in self.units}
        around = {path for unit in self.units for name in (unit.layer, unit.gate) for path in paths_to(name)}
        return [
            name
            for name, module in self.model.named_modules()
            if name
            and layers.isdisjoint(paths_to(name))
            and name not in around
            and any(True for _ in module.parameters())
        ]

    def _gate_hook(self, numbers: Sequence[int]) -> Callable[..., Any]:
        calls = cycle(numbers)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            refuse_own_backward(type(self.model).__name__)
            index = next(calls)
            self.order.append(index)
            leaves, spec = pytree.tree_flatten(output)
            self.others[index] = (spec, tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))
            self.outputs[index] = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.passed_on[index] = [
                self._fresh(tensor, index, number) for number, tensor in enumerate(self.outputs[index])
            ]
            remaining = iter(self.passed_on[index])
            return pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), output)

        return hook

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        place = find_place(args, kwargs) if self.entered is None else None
        if place is None:
            return None
        made = kwargs[place] if isinstance(place, str) else args[place]
        self.entered = place, made, self._fresh(made, ENTRY)
        if isinstance(place, str):
            return args, {**kwargs, place: self.entered[2]}
        return (*args[:place], self.entered[2], *args[place + 1 :]), kwargs

    def _fresh(self, tensor: torch.Tensor, index: int, number: int = 0) -> torch.Tensor:
        with self.flows.paused(), torch.enable_grad():
            leaf = tensor.detach()
            self.leaves[id(leaf)], self.numbers[id(leaf)] = index, number
            self.keep.append(leaf)
            passed_on = leaf.requires_grad_(leaf.is_floating_point()).clone()  # which the model may write to
        if not leaf.requires_grad:
            self.flows.begin_at(passed_on, leaf)
        return passed_on

    def _outside_hook(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            self.ran.add(name)
            if not self.order:
                self.early.add(name)
            tracked = False

            def mark(tensor: torch.Tensor) -> torch.Tensor:
                # A clone's node stays in the graph when the model writes to the tensor; the node of a view would be
                # replaced.
                nonlocal tracked
                if tensor.grad_fn is None:
                    return tensor
                tracked = True
                marked = tensor.clone()
                self.produced.setdefault(marked.grad_fn, set()).add(name)
                return marked

            output = pytree.tree_map_only(torch.Tensor, mark, output)
            if not tracked:
                self.untracked.add(name)
                return output
            given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}
            for tensor in pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.grad_fn is None and id(tensor) not in given:
                    self._mark_beside(tensor, name)
            return output

        return hook

    def _mark_beside(self, tensor: torch.Tensor, name: str) -> None:
        """A mask that a module returns beside what autograd follows."""
        with self.flows.paused():
            marker = tensor.detach()
        self.beside[id(marker)] = name
        self.keep.append(marker)
        self.flows.add(tensor, marker)

    def _evaluate(self, result: list[torch.Tensor], outside: list[str]) -> Survey:
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        own = [set(self._layer_parameters(unit, names)) for unit in self.units]
        outer = {group[0] for group in names.values() if not all(self._in_layer(name) for name in group)}
        always = {
            names[id(parameter)][0]
            for module in self.untracked
            for parameter in self.model.get_submodule(module).parameters()
        }
        parts, joined = [], set()
        made = self._walk([self.entered[1]], names) if self.entered is not None else (set(), set(), set())
        behind, only_first = Part(frozenset(), frozenset(), frozenset()), True
        for index in range(len(self.units) + 1):
            outputs = self.outputs[index] if index < len(self.units) else result
            reads, parameters, modules = self._walk(outputs, names)
            if index == 0:
                behind = Part(frozenset(), frozenset(parameters | own[0] | always), frozenset(modules | self.untracked))
            if ENTRY in reads:
                only_first &= index == 0
                reads, parameters, modules = (reads | made[0]) - {ENTRY}, parameters | made[1], modules | made[2]
            mine = own[index] if index < len(self.units) else outer
            for other, others in enumerate(own):
                if other != index and (parameters & others) - mine:
                    joined.add((min(other, index), max(other, index)))
            if index < len(self.units):
                parameters |= own[index]
            parts.append(Part(frozenset(reads), frozenset(parameters | always), frozenset(modules | self.untracked)))
        trained = {name for part in parts for name in part.parameters}
        first_layer = min(
            position for position, (name, _) in enumerate(self.model.named_modules()) if name == self.units[0].layer
        )
        position_of = {name: position for position, (name, _) in enumerate(self.model.named_modules())}
        entry = None
        if self.entered is not None and only_first and not made[0]:
            place, _, passed_on = self.entered
            template = Template(pytree.tree_flatten(0)[1], (TENSOR,), (passed_on._version > 0,))
            before = Part(frozenset(), frozenset(made[1] | always), frozenset(made[2] | self.untracked))
            entry = Entry(self.units[0].layer, place, template, before, behind)
        unread = {}
        for group in names.values():
            if group[0] not in trained:
                owner = group[0].rpartition(".")[0]
                unread[group[0]] = owner in self.early or (owner not in self.ran and position_of[owner] < first_layer)
        return Survey(
            units=tuple(self.units),
            templates=tuple(
                Template(
                    *self.others[index],
                    tuple(tensor._version > 0 for tensor in self.passed_on[index]),
                    frozenset(
                        number for number in range(len(self.passed_on[index])) if (index, number) not in self.read
                    ),
                )
                for index in range(len(self.units))
            ),
            parts=tuple(parts),
            names={group[0]: tuple(group) for group in names.values()},
            outside=tuple(outside),
            ran=frozenset(self.ran),
            unread=unread,
            joined=tuple(sorted(pair for pair in joined if pair[0] < pair[1])),
            entry=entry,
            tail_reads=frozenset(self.met),  # the last walk began at the model's output
        )

    def _layer_parameters(self, unit: Unit, names: dict[int, list[str]]) -> Iterable[str]:
        return (names[id(parameter)][0] for parameter in self.model.get_submodule(unit.layer).parameters())

    def _in_layer(self, name: str) -> bool:
        return any(name.startswith(f"{unit.layer}.") for unit in self.units)

    def _walk(self, outputs: list[torch.Tensor], names: dict[int, list[str]]) -> tuple[set[int], set[str], set[str]]:
        """Units, parameters and modules that `outputs` are made of."""
        parameters, modules = set(), set()
        self.met = {self._place(tensor) for tensor in outputs if id(tensor) in self.leaves}
        seen = set().union(*map(self.flows.sources, outputs))
        pending = list(seen)
        while pending:
            node = pending.pop()
            variable = node if isinstance(node, torch.Tensor) else getattr(node, "variable", None)
            if variable is not None:
                if id(variable) in self.leaves:
                    self.met.add(self._place(variable))
                elif id(variable) in names:
                    parameters.add(names[id(variable)][0])
                elif id(variable) in self.beside:
                    modules.add(self.beside[id(variable)])
            if variable is node:
                continue
            modules |= self.produced.get(node, set())
            for following in (*(before for before, _ in node.next_functions), *self.flows.beyond(node)):
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
        self.read |= self.met
        return {unit for unit, _ in self.met}, parameters, modules

    def _place(self, leaf: torch.Tensor) -> tuple[int, int]:
        return self.leaves[id(leaf)], self.numbers[id(leaf)]


def _plain(output: Any) -> Any:
    """Output objects that pytree does not know (outputs of remote code) as the dict of their fields."""
    if isinstance(output, dict):
        return dict(output)
    return output
