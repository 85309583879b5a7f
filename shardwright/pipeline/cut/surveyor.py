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

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import cycle
from typing import Any

import torch
from torch import nn

from ...models.dry_run import call_model, meta_copy, run_dry, weight_sharing_copy
from ...models.example_inputs import example_batches, takes_more_than_text
from ...models.known_values import run_knowing
from ...models.layer_chain import Unit, numbers_by_module, paths_to
from ...utils import pytree
from ...utils.objects import tensors_within
from .atoms import Buffer, Inside, ModuleOutput, Reads, Returned, Weight
from .attributes import Actor, Kept, Place, Watched
from .chain import Chain, CutError, OtherOrder, list_of, refuse_objects, refuse_own_backward
from .containers import Containers
from .entry import ENTRY, Entry, find_place
from .flows import Flows, Region
from .joints import Joints
from .survey import Accumulated, Part, Survey
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
    ways = [*_WITHOUT_NUMBERS]
    if not any(parameter.is_meta for parameter in model.parameters()):
        ways.append(_ON_NUMBERS)
    found: list[Survey] = []
    for way in ways:
        for example in examples:
            if found and not _may_tell_more(model, found, example):
                continue
            try:
                found.append(_in_both_modes(_survey(way, model, chain, example), way, model))
            except CutError:
                if not found:
                    raise
            except Exception as error:  # the model's own code: anything can happen on a guessed batch
                failures.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        if found and all(any(unit in one.units for one in found) for tower in chain.towers for unit in tower):
            break
    if found:
        return _together([*found, *(more for one in found if _is_in_vain(one) for more in _saying_yes(model, one))])
    raise ValueError(
        f"{type(model).__name__} could not be run on a guessed batch to learn where it can be cut "
        f"({'; '.join(dict.fromkeys(failures))}); pass example_inputs=, a batch like the real ones, to the plugin, or "
        "use pp_size=1"
    )


def _is_in_vain(survey: Survey) -> bool:
    """Whether a layer ran and nothing read what it returned: a condition on numbers kept the model from it, perhaps."""
    return any(len(template.unread) == template.num_tensors > 0 for template in survey.templates[:-1])


def _saying_yes(model: nn.Module, survey: Survey) -> list[Survey]:
    """Of the same run, but that the model is answered yes where it asks whether there is anything to read."""
    way = _Way(meta_copy, lambda copied, example, flows: run_dry(copied, example, truth=True, within=flows))
    with suppress(Exception):  # the model's own code: there may be nothing
        return [way.learn(model, [*survey.units], survey.example, training=True)]
    return []


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


def survey_batch(model: nn.Module, units: Sequence[Unit], batch: Any, training: bool) -> Survey | None:
    """What `batch` has the chain of `units` read; None where a forward without numbers does not tell."""
    for way in _WITHOUT_NUMBERS:
        with suppress(Exception):  # the model's own code: anything can happen without numbers
            return way.learn(model, [*units], batch, training)
    return None


def _survey(way: _Way, model: nn.Module, chain: Chain, example: Any) -> Survey:
    units = chain.guess
    for _ in range(3):  # in the guessed order, in that of the run, without towers that are torn apart by it
        try:
            return replace(way.learn(model, units, example, way.training), example=example)
        except OtherOrder as other:
            units = chain.as_run(other.units, type(model).__name__)
    raise CutError(
        f"{type(model).__name__} cannot be cut into stages: its layers run in another order in every forward"
    )


def _in_both_modes(survey: Survey, way: _Way, model: nn.Module) -> Survey:
    """With what the model reads where it evaluates, too (or trains, where `survey` is of an evaluation)."""
    try:
        other = way.learn(model, [*survey.units], survey.example, not way.training)
    except Exception:  # the model's own code
        return survey
    return survey.reading_besides(other)


@dataclass(frozen=True)
class _Way:
    """How a survey is learnt.

    copy      of a model, which runs
    call      runs it, inside of flows, on an example
    training  in which mode first
    """

    copy: Callable[[nn.Module], nn.Module]
    call: Callable[[nn.Module, Any, Flows], Any]
    training: bool = True

    def learn(self, model: nn.Module, units: list[Unit], example: Any, training: bool) -> Survey:
        """Survey a copy, and, where its forward changes what modules keep, one that is watched while it does."""

        def copy() -> nn.Module:
            copied = self.copy(model)
            copied.train(training)
            return copied

        copied, shared = copy(), [*Kept.of(model).owners.values()]
        before = Kept.of(copied, shared)
        survey = _Surveyor(copied, units).run(partial(self.call, copied, example))
        changed = before.changed(Kept.of(copied, shared))
        if not changed:
            return survey
        copied = copy()
        surveyor = _Surveyor(copied, units, changes=changed)
        survey = surveyor.run(partial(self.call, copied, example))
        before = Kept.of(copied, shared)
        with suppress(Exception):  # the model's own code
            self.call(copied, example, Flows())
        again = surveyor.changing(before.changed(Kept.of(copied, shared)))
        return replace(survey, accumulated=(*survey.accumulated, *again))


def _call_on_numbers(copied: nn.Module, example: Any, flows: Flows) -> Any:
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), flows:
        return call_model(copied, example)


_WITHOUT_NUMBERS = (
    _Way(meta_copy, lambda copied, example, flows: run_dry(copied, example, within=flows)),
    _Way(meta_copy, lambda copied, example, flows: run_knowing(copied, example, within=flows)),
)
# On a copy that shares the weights' memory and nothing else, first without dropout.
_ON_NUMBERS = _Way(weight_sharing_copy, _call_on_numbers, training=False)


@dataclass
class _Layer:
    """A call of a layer that runs."""

    unit: int
    region: Region
    containers: Containers


def _only_tensors(leaves: Sequence[Any]) -> bool:
    """Whether it is known all of what a module returned who reads it. There has to be something."""
    plain = all(isinstance(leaf, torch.Tensor | bool | int | float | str | None) for leaf in leaves)
    return plain and any(isinstance(leaf, torch.Tensor) for leaf in leaves)


@dataclass
class _Surveyor:
    """One dry run of `model` with hooks on its gates and on the modules outside its layers."""

    model: nn.Module
    units: list[Unit]
    flows: Flows = field(default_factory=Flows)
    order: list[int] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)  # masks of what units return, and behind them of the output
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    passed_on: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    others: dict[int, tuple[pytree.TreeSpec, tuple[Any, ...]]] = field(default_factory=dict)
    # place of the entry, the mask of the tensor, what goes on instead
    entered: tuple[int | str, int, torch.Tensor] | None = None
    early: set[str] = field(default_factory=set)  # modules outside that ran before the first gate
    ran: set[str] = field(default_factory=set)
    # modules outside that do more, or less, than to return tensors: who depends on them is unknown
    untracked: set[str] = field(default_factory=set)
    # tensors that modules keep: full name, table of the module, name in there
    kept: list[tuple[str, dict[str, Any], str, torch.Tensor]] = field(default_factory=list)
    running: list[_Layer] = field(default_factory=list)
    regions: dict[int, Region] = field(default_factory=dict)  # that made what a gate returned
    numbers: dict[int, int] = field(default_factory=dict)  # what a layer has read off tensors
    rewritten: set[str] = field(default_factory=set)
    accumulated: list[Accumulated] = field(default_factory=list)
    gates: list[int] = field(default_factory=list)  # units whose gates run, around their layers
    changes: Collection[Place] = ()  # what is kept by modules and changes in a forward, besides tensors

    def __post_init__(self) -> None:
        self.joints = Joints(self.units)
        self.watched = Watched(self.model, self.changes, self._now)

    def _now(self) -> Actor:
        """The part of the forward that runs."""
        if self.running:
            return Actor(self.running[-1].unit, self.running[-1].unit)
        return Actor(len(self.order), self.gates[-1] if self.gates else len(self.units))

    def run(self, call: Callable[[Flows], Any]) -> Survey:
        """call: runs the model, inside of the flows that it is given."""
        handles = []
        # Hooks of a script belong to what they are on, as in the stage that runs it: its region lasts from before the
        # first of them until behind the last one.
        for layer, numbers in numbers_by_module(unit.layer for unit in self.units).items():
            module = self.model.get_submodule(layer)
            handles.append(module.register_forward_pre_hook(self._begin_layer(numbers), with_kwargs=True, prepend=True))
            if not self._is_early(numbers[0]):
                handles.append(module.register_forward_hook(self._end_layer))
        first = self.model.get_submodule(self.units[0].layer)
        handles.append(first.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
        for gate, numbers in numbers_by_module(unit.gate for unit in self.units).items():
            module, early = self.model.get_submodule(gate), self._is_early(numbers[0])
            handles.append(module.register_forward_hook(self._gate_hook(numbers), prepend=early))
            if self.units[numbers[0]].layer != gate:
                handles.append(module.register_forward_pre_hook(self._begin_gate(numbers[0]), prepend=True))
            if early:
                module = self.model.get_submodule(self.units[numbers[0]].layer)
                handles.append(module.register_forward_hook(self._end_layer, prepend=True))
        outside = self._outside()
        for name in outside:
            handles += self._watch_outside(name)
        names = self._begin_atoms()
        try:
            output = call(self.flows)
        finally:
            for handle in handles:
                handle.remove()
        if self.order != list(range(len(self.units))):
            raise OtherOrder([self.units[number] for number in self.order])
        self.watched.note_writes()
        returned = tensors_within(output, caches=False)  # where each layer puts its own: nobody is given those
        self.made[len(self.units)] = self.flows.union(returned) | self.flows.numbers
        return self._evaluate(outside, names)

    def _is_early(self, number: int) -> bool:
        """Whether a unit is cut before transformers' own hooks collect hidden states: those of a tower, which are read
        later on.
        """
        return list_of(self.units[number]) != list_of(self.units[-1])

    def _begin_atoms(self) -> dict[int, list[str]]:
        """Parameters and buffers; every name of each parameter by its id."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
            self.flows.add(parameter, self.flows.bit(Weight(names[id(parameter)][0])))
        for prefix, module in self.model.named_modules():
            path = f"{prefix}." if prefix else ""
            for table in (module._parameters, module._buffers, vars(module)):
                self.kept += [
                    (path + name, table, name, tensor)
                    for name, tensor in table.items()
                    if isinstance(tensor, torch.Tensor)
                ]
        for name, _, _, tensor in self.kept:
            self.flows.add(tensor, self.flows.bit(Buffer(name)))
        return names

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

    # Layers ----------------------------------------------------------------------------------------------------------

    def _begin_gate(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.watched.note_writes()
            self.gates.append(number)
            self.regions[number] = self.flows.enter(Region(self.flows.bit(Inside(number, of_gate=True))))

        return hook

    def _begin_layer(self, numbers: Sequence[int]) -> Callable[..., None]:
        calls = cycle(numbers)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            index = next(calls)
            self.watched.note_writes()
            containers = Containers(args, kwargs)
            self.joints.given(index, containers)
            region = self.flows.enter(Region(self.flows.bit(Inside(index))))
            self.running.append(_Layer(index, region, containers))

        return hook

    def _end_layer(self, module: nn.Module, args: Any, output: Any) -> None:
        self.watched.note_writes()
        ended = self.running.pop()
        self.flows.leave(ended.region)
        index, atom = ended.unit, ended.region.atom
        self.numbers[index] = ended.region.numbers
        self.regions.setdefault(index, ended.region)

        def marked(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if self.flows.mask(tensor) & atom else self._copied(tensor, self.flows.mask(tensor) | atom)

        changes = ended.containers.changes(marked)
        self.joints.changed(index, changes)
        if ended.region.reaches_out:
            self.joints.wrote.add(index)

    def _gate_hook(self, numbers: Sequence[int]) -> Callable[..., Any]:
        calls = cycle(numbers)

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            refuse_own_backward(type(self.model).__name__)
            index = next(calls)
            region = self.regions[index]
            if self.units[index].layer != self.units[index].gate:
                self.watched.note_writes()
                self.gates.pop()
                self.flows.leave(region)
            self.order.append(index)
            leaves, spec = pytree.tree_flatten(output)
            refuse_objects(self.units[index].gate, leaves)
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.others[index] = (spec, tuple(TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))
            read = self.flows.numbers | self.numbers.get(index, 0) | region.numbers
            self.made[index] = self.flows.union(tensors) | read
            self.passed_on[index] = []
            for number, tensor in enumerate(tensors):
                fresh = self._fresh(tensor, Returned(index, number))
                if not self.flows.is_new(tensor, region):  # the layer has handed on what it was given, changed or not
                    self.flows.share(tensor, fresh, self.flows.bit(Inside(index)))
                for other, passed_on in zip(tensors, self.passed_on[index], strict=False):
                    if self.flows.is_one(tensor, other):
                        self.joints.returned_alike.add(index)
                        self.flows.share(fresh, passed_on, self.flows.bit(Inside(index)))
                self.passed_on[index].append(fresh)
            remaining = iter(self.passed_on[index])
            return pytree.tree_map_only(torch.Tensor, lambda _: next(remaining), output)

        return hook

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        place = find_place(args, kwargs) if self.entered is None else None
        if place is None:
            return None
        made = kwargs[place] if isinstance(place, str) else args[place]
        mask = self.flows.mask(made) | self.flows.numbers
        self.entered = place, mask, self._fresh(made, Returned(ENTRY, 0))
        if isinstance(place, str):
            return args, {**kwargs, place: self.entered[2]}
        return (*args[:place], self.entered[2], *args[place + 1 :]), kwargs

    def _fresh(self, tensor: torch.Tensor, atom: Returned) -> torch.Tensor:
        with self.flows.paused(), torch.enable_grad():
            leaf = tensor.detach()
            passed_on = leaf.requires_grad_(leaf.is_floating_point()).clone()  # which the model may write to
        self.flows.set(passed_on, self.flows.bit(atom))
        return passed_on

    def _copied(self, tensor: torch.Tensor, mask: int) -> torch.Tensor:
        with self.flows.paused():
            copied = tensor.clone()
        self.flows.set(copied, mask)
        return copied

    # Modules outside of them -----------------------------------------------------------------------------------------

    def _watch_outside(self, name: str) -> list[Any]:
        module, atom = self.model.get_submodule(name), self.flows.bit(ModuleOutput(name))
        calls: list[tuple[Region, Containers]] = []

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            containers = Containers(args, kwargs)
            calls.append((self.flows.enter(Region(on_write=atom)), containers))

        def end(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            region, containers = calls.pop()
            self.flows.leave(region)
            self.ran.add(name)
            if not self.order:
                self.early.add(name)
            leaves = pytree.tree_leaves(output)
            if containers.changes(lambda tensor: tensor) or not _only_tensors(leaves):
                self.untracked.add(name)
            if any(isinstance(leaf, bool | int | float) for leaf in leaves):
                self.flows.note_numbers(region.numbers)

            given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}

            def mark(tensor: torch.Tensor) -> torch.Tensor:
                if id(tensor) in given:  # without the module there is the same; if it wrote to it, that is marked
                    return tensor
                mask = self.flows.mask(tensor) | atom | region.numbers
                if self.flows.is_new(tensor, region):
                    self.flows.set(tensor, mask)
                    return tensor
                handed_on = self._copied(tensor, mask)  # those who read what was given do not depend on the module
                self.flows.share(tensor, handed_on, atom)
                return handed_on

            return pytree.tree_map_only(torch.Tensor, mark, output)

        return [
            module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
            module.register_forward_hook(end, with_kwargs=True),
        ]

    # What it all means -----------------------------------------------------------------------------------------------

    def _evaluate(self, outside: list[str], names: dict[int, list[str]]) -> Survey:
        own = [set(self._layer_parameters(unit, names)) for unit in self.units]
        outer = {group[0] for group in names.values() if not all(self._in_layer(name) for name in group)}
        always = {
            names[id(parameter)][0]
            for module in self.untracked
            for parameter in self.model.get_submodule(module).parameters()
        }
        entering = Reads.of(self.flows.atoms(self.entered[1])) if self.entered is not None else None
        is_alone = not self._follow_state() and not self.joints.kept(self.watched.reads, self.watched.writes)
        self.joints.finish()
        reads = [Reads.of(self.flows.atoms(self.made[index])) for index in range(len(self.units) + 1)]
        parts, behind, only_first = [], Part(frozenset(), frozenset(), frozenset()), True
        for index, found in enumerate(reads):
            # Buffers may bring in what comes later, in the step before.
            units = {unit for unit in found.units if unit < index}
            parameters, modules = found.parameters, found.modules
            if index == 0:
                behind = Part(frozenset(), frozenset(parameters | own[0] | always), frozenset(modules | self.untracked))
            if ENTRY in units:
                assert entering is not None
                only_first &= index == 0
                units = (units | entering.units) - {ENTRY}
                parameters, modules = parameters | entering.parameters, modules | entering.modules
            mine = own[index] if index < len(self.units) else outer
            for other, others in enumerate(own):
                if other != index and (parameters & others) - mine:
                    name, whose = self.joints.name(index), self.joints.name(other)
                    self.joints.join(other, index, f"{name} computes with parameters of {whose} by itself")
            for inside in found.inside:
                if index > inside.unit or not inside.of_gate:  # of the gate its layers are a part
                    self.joints.reads_inside(index, inside.unit)
            if index < len(self.units):
                parameters = parameters | own[index]
            parts.append(Part(frozenset(units), frozenset(parameters | always), frozenset(modules | self.untracked)))
        position_of = {name: position for position, (name, _) in enumerate(self.model.named_modules())}
        entry = None
        if self.entered is not None and entering is not None and is_alone and only_first and not entering.units:
            place, _, passed_on = self.entered
            template = Template(pytree.tree_flatten(0)[1], (TENSOR,), (self.flows.is_written(passed_on),))
            before = Part(
                frozenset(), frozenset(entering.parameters | always), frozenset(entering.modules | self.untracked)
            )
            entry = Entry(self.units[0].layer, place, template, before, behind)
        trained = {name for part in parts for name in part.parameters}
        unread = {}
        for group in names.values():
            if group[0] not in trained:
                owner = group[0].rpartition(".")[0]
                ahead = position_of[owner] < position_of[self.units[0].layer]
                unread[group[0]] = owner in self.early or (owner not in self.ran and ahead)
        read = {place for found in (*reads, *([entering] if entering is not None else ())) for place in found.places}
        return Survey(
            units=tuple(self.units),
            templates=tuple(self._template(index, read) for index in range(len(self.units))),
            parts=tuple(parts),
            names={group[0]: tuple(group) for group in names.values()},
            outside=tuple(outside),
            ran=frozenset(self.ran),
            unread=unread,
            joined=self.joints.pairs,
            reasons=self.joints.reasons,
            entry=entry,
            tail_reads=frozenset(reads[-1].places),
            rewritten=frozenset(self.rewritten),
            accumulated=tuple(self.accumulated),
        )

    def changing(self, places: Iterable[Place]) -> list[Accumulated]:
        """Those of `places` that are written to around the layers: each stage that runs there does so."""
        return [
            Accumulated(str(place), self._module_outside(place.path), actor)
            for place in sorted(places)
            for actor in sorted(self.watched.writes.get(place, ()))
            if actor.low < actor.high
        ]

    def _module_outside(self, path: str) -> str:
        """The outermost one of those outside the layers that can be stubs which has what is at `path`."""
        return next((name for name in self._outside() if f"{path}.".startswith(f"{name}.")), "")

    def _template(self, index: int, read: set[tuple[int, int]]) -> Template:
        tensors = self.passed_on[index]
        unread = frozenset(number for number in range(len(tensors)) if (index, number) not in read)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return Template(*self.others[index], tuple(map(self.flows.is_written, tensors)), unread, shapes)

    def _follow_state(self) -> bool:
        """What a forward leaves in buffers, and in other tensors that modules keep, the next one reads: there, too, who
        reads it needs what it is made of. Whether what comes before the first layer does.
        """
        before_layers = False
        for name, table, key, before in self.kept:
            now = table.get(key)
            if not isinstance(now, torch.Tensor) or (now is before and not self.flows.is_written(before)):
                continue
            self.rewritten.add(name)
            atom, left = self.flows.bit(Buffer(name)), self.flows.mask(now)
            made_of = Reads.of(self.flows.atoms(left))
            inside = {each.unit for each in made_of.inside}
            behind = min(max(made_of.units, default=ENTRY) + 1, len(self.units))  # where it can be written at all
            made_later = made_of.units or made_of.inside
            if left & atom and not inside and (now is not before or self.flows.is_added_to(now)):
                by = Actor(behind if made_of.units else 0, len(self.units))
                self.accumulated.append(Accumulated(name, self._module_outside(name), by))
            if self.entered is not None and self.entered[1] & atom and made_later:
                self.made[0] |= atom
                before_layers = True
            for index, mask in self.made.items():
                if not mask & atom:
                    continue
                self.made[index] = mask | left
                for other in sorted(inside) or [behind] * (behind > index):
                    where = self.joints.name(other)
                    why = f"{where} writes to {name}, which {self.joints.name(index)} reads"
                    self.joints.join(other, index, why)
        return before_layers

    def _layer_parameters(self, unit: Unit, names: dict[int, list[str]]) -> Iterable[str]:
        return (names[id(parameter)][0] for parameter in self.model.get_submodule(unit.layer).parameters())

    def _in_layer(self, name: str) -> bool:
        return any(name.startswith(f"{unit.layer}.") for unit in self.units)
