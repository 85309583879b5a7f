"""Calls the layers of a stage without the model around them; see [Note: calling layers without the model] in
`layer_trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ...models.layer_chain import Unit
from ...utils import pytree
from ...utils.tensors import tensors_of
from ..batch.step_inputs import StepInputs
from ..cut.entry import ENTRY
from ..cut.survey import Survey
from ..cut.template import TENSOR, Template
from .layer_trace import LayerCall, Proof, Trace, context
from .model_state import Kept, module_state, same_state
from .surroundings import ModelState, Surroundings

_MOST_ANSWERS = 64
_MOST_VERDICTS = 1024  # a loader with ever new lengths must not fill the memory with them


@dataclass
class Calls:
    """What a trace found.

    units    arguments of the layers that it reached
    metas    shape and dtype of the tensors that every layer was assumed to return
    served   stages that it was made for
    pending  these times microbatches that have not used it
    changed  the model has changed itself in the trace, which may be for the first time only
    outdated the model has changed itself since
    """

    units: dict[int, LayerCall]
    metas: tuple[tuple[torch.Size, torch.dtype], ...]
    served: frozenset[int]
    pending: int
    changed: bool = False
    outdated: bool = False
    orders: dict[int, list[tuple[int, list[int]]]] = field(default_factory=dict)

    def order(self, units: range) -> list[tuple[int, list[int]]]:
        """`units`, and with each those whose outputs no later one needs."""
        if units.start not in self.orders:
            last_use = {source: unit for unit in units for source in self.units[unit].sources}
            self.orders[units.start] = [
                (unit, [source for source, use in last_use.items() if use == unit] + [unit] * (unit not in last_use))
                for unit in units
            ]
        return self.orders[units.start]

    def usable(self, units: range) -> bool:
        """Whether all of `units` were reached and no layer has written to what several get."""
        return all(
            unit in self.units and all(tensor._version == version for tensor, version in self.units[unit].constants)
            for unit in units
        )


class _Stage(NamedTuple):
    """A stage of this rank between the first and the last. kind: equal for stages that one trace can serve."""

    number: int
    units: range
    boundary: tuple[int, ...]
    kind: Hashable


class LayerCalls:
    """What the layers of a rank's stages are called with.

    stages  units of the stages that this rank holds, by number
    surroundings  of the layers of `survey`
    """

    def __init__(
        self, model: nn.Module, survey: Survey, stages: Mapping[int, range], surroundings: Surroundings
    ) -> None:
        self._units: Sequence[Unit] = survey.units
        self._templates: dict[int, Template] = dict(enumerate(survey.templates))
        self._single = [template.spec.is_leaf() for template in survey.templates]  # which is nothing but a tensor
        self._entry = survey.entry
        if survey.entry is not None:
            self._templates[ENTRY] = survey.entry.template
        self._layers = [model.get_submodule(unit.layer) for unit in survey.units]
        self.surroundings = surroundings
        different: list[Template] = []
        self._stages: dict[int, _Stage] = {}
        for number, units in stages.items():
            whole = all(unit.layer == unit.gate for unit in survey.units[units.start : units.stop])
            if not units or not whole:
                continue
            boundary = survey.boundary(units.start)
            kind: Hashable = number, "alone"
            if boundary == (units.start - 1,):
                template = self._templates[units.start - 1]
                if template not in different:
                    different.append(template)
                kind = different.index(template), survey.lists[units.start]
            self._stages[number] = _Stage(number, units, boundary, kind)
        self._unfit: set[Hashable] = set()
        self._arrived: dict[Hashable, Hashable] = {}  # shapes, by stage and shapes of the batch
        self._proofs: dict[Hashable, Proof] = {}
        self._state_then: ModelState = [], {}  # of the model, when it was traced last
        # to change something in a trace, as modules do that compute a table when it is first asked for
        self._chances = 2

    def find(
        self,
        number: int,
        received: Mapping[int, Any],
        inputs: StepInputs,
        index: int,
        run: Callable[[Trace, Any], None],
    ) -> Calls | None:
        """Calls for a stage and a microbatch; None where the model's forward has to run. `run` is the forward under
        a trace.
        """
        stage = self._stages.get(number)
        if stage is None or torch.is_inference_mode_enabled() or self.surroundings.is_hooked():
            return None
        arrived = [tensors_of(received[unit]) for unit in stage.boundary]
        metas = tuple((tensor.shape, tensor.dtype) for tensors in arrived for tensor in tensors)
        if not metas:
            return None
        look = (stage.kind, metas, context(arrived[-1][0].device), self.surroundings.modes)
        frame = inputs.frame(index)
        if len(self._arrived) >= _MOST_VERDICTS:
            self._arrived.clear()
        self._arrived[number, frame] = metas
        proof = self._proofs.get((look, frame))
        group, size = inputs.group(index, proof.read if proof is not None else frozenset())
        calls: Calls | None = inputs.calls.get((group, look))
        pending = 0
        if calls is not None and number not in calls.served and (number, look, frame) in self._unfit:
            return None
        if calls is not None and calls.outdated:
            del inputs.calls[group, look]
            pending, calls = calls.pending, None
        if calls is None:
            if (number, look, frame) in self._unfit:
                return None
            served = [other for other in self._stages.values() if other.kind == stage.kind]
            served = [other for other in served if (other.number, look, frame) not in self._unfit]
            served = [other for other in served if self._arrived.get((other.number, frame), metas) == metas]
            if len(served) * size == 1 or pending == 1:  # for one F the model's own forward is the shortest way
                return None
            group, calls = self._traced(stage, served, received, look, inputs, index, run)
            calls.pending = pending or calls.pending
            inputs.calls[group, look] = calls
        calls.pending -= number in calls.served
        if not calls.pending:
            del inputs.calls[group, look]
        if not calls.usable(stage.units):
            if len(self._unfit) >= _MOST_VERDICTS:
                self._unfit.clear()
            if not calls.changed:
                self._unfit.add((number, look, frame))
            return None
        return calls

    def forward_ran(self, inputs: StepInputs) -> None:
        """The model's own forward has: what it has changed about itself, the next traces are to see."""
        if inputs.calls and not self.surroundings.unchanged_since(self._state_then):
            for calls in inputs.calls.values():
                calls.outdated = True

    def _traced(
        self,
        stage: _Stage,
        served: Sequence[_Stage],
        received: Mapping[int, Any],
        look: Hashable,
        inputs: StepInputs,
        index: int,
        run: Callable[[Trace, Any], None],
    ) -> tuple[Hashable, Calls]:
        """The group of microbatch `index` and the calls of all layers that could be traced."""
        first = min(other.units.start for other in served)
        wanted = frozenset(unit for other in served for unit in other.units)
        sources = {unit: tensors_of(received[unit]) for unit in stage.boundary}
        if len(served) > 1:  # stages that get the output of the layer before
            sources = {first - 1: sources[stage.units.start - 1]}
        key = (look, inputs.frame(index))
        around = self.surroundings
        state = around.state()
        proof = self._proofs.get(key)
        if proof is None or not around.is_same(proof.state, state):
            if len(self._proofs) >= _MOST_VERDICTS:
                self._proofs.clear()
            read = proof.read if proof is not None else frozenset()  # groups keep their names
            proof = self._proofs[key] = Proof(state)
            proof.read = read
        contents = inputs.contents(index, proof.read)
        replies = proof.known.get(contents, ()) if contents is not None else ()
        changed = False
        batch = inputs.batch(index)  # entries are known by their memory, and a cast makes new ones each time
        trace = Trace(self._templates, self._entry, first, wanted, sources, batch, proof, prove=False, replies=replies)
        if proof.paths:
            run(trace, batch)
        if not trace.is_proven:
            trace = Trace(self._templates, self._entry, first, wanted, sources, batch, proof, prove=True)
            looked_at = [module for unit in wanted for module in self._layers[unit].modules()]
            # also of layers of other stages, to which transformers adds hooks at the model's first call
            everything = [module for layer in self._layers for module in layer.modules()] + around.modules
            before, kept = module_state(looked_at), Kept(everything)
            run(trace, batch)
            assert trace.prover is not None
            around.defined |= trace.prover.defined
            if not same_state(before, module_state(looked_at)) or not around.unchanged_since(state):
                kept.put_back()
                trace.disprove()
                changed = self._chances > 0
                self._chances -= changed
            proof.read |= trace.prover.read
            proof.by_state |= trace.prover.by_state
            contents = inputs.contents(index, proof.read)
        self._state_then = around.state()
        if trace.is_proven and contents is not None and not proof.by_state:
            if len(proof.known) >= _MOST_ANSWERS:
                proof.known.clear()
            proof.known[contents] = tuple(trace.answers)
        group, size = inputs.group(index, proof.read)
        metas = tuple((tensor.shape, tensor.dtype) for tensor in sources[max(sources)])
        return group, Calls(
            trace.calls, metas, frozenset(other.number for other in served), len(served) * size, changed
        )

    def distrust(self, number: int, inputs: StepInputs) -> None:
        """The layers of a stage did not return what traces assume."""
        del self._stages[number]
        inputs.calls.clear()

    def run(
        self, units: range, calls: Calls, received: Mapping[int, Any], wanted: frozenset[int], past: Any = None
    ) -> tuple[dict[int, Any], dict[int, Any] | None]:
        """Call the layers of `units`: (outputs of the wanted ones, None). past: of the slices before this one.

        Where a layer does not return what was assumed: (outputs so far, all outputs that a later layer may read), for
        the model's forward to go on behind that layer.
        """
        alive: dict[int, Any] = dict(received)
        tensors = {unit: tensors_of(self._templates[unit].apart(output)) for unit, output in received.items()}
        outputs: dict[int, Any] = {}
        last = units[-1]
        for unit, done_with in calls.order(units):
            args, kwargs = calls.units[unit].filled(tensors, past)
            output = self._layers[unit](*args, **kwargs)
            del args, kwargs
            if unit in wanted:
                outputs[unit] = output if unit == last else self._templates[unit].apart(output)
            if unit == last:
                break
            alive[unit] = output
            found = _tensors_as(output, self._templates[unit], self._single[unit])
            if found is None:
                return outputs, alive
            for tensor, (shape, dtype) in zip(found, calls.metas, strict=True):
                if tensor.shape != shape or tensor.dtype is not dtype:
                    return outputs, alive
            tensors[unit] = found
            for source in done_with:
                tensors.pop(source, None)
                alive.pop(source, None)
            del output, found
        return outputs, None


def _tensors_as(output: Any, template: Template, single: bool) -> list[torch.Tensor] | None:
    """The tensors of `output`, or None where it has another structure."""
    if isinstance(output, torch.Tensor):
        return [output] if single else None
    leaves, spec = pytree.tree_flatten(output)
    if spec != template.spec:
        return None
    for leaf, other in zip(leaves, template.others, strict=True):
        if isinstance(leaf, torch.Tensor) != (other is TENSOR) or (other is not TENSOR and leaf != other):
            return None
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
