"""Cutting a model into stages without touching its forward.

The model keeps its module tree: every layer stays where it is, so list lengths, names, layer indices and state-dict
keys stay right. What a rank does not hold is released (its parameters become shapes without memory that no longer count
as parameters), and the modules on the way change their class in place:

    a gate before the stage      returns what the stage received in its place
    a layer of the stage         runs, through activation checkpointing if it is one of those that recompute
    the stage's last gate        ends the forward, which is left by an exception
    a module outside the layers  whose output this stage does not read returns NaN (embeddings behind the first stage)

One model serves all stages (chunks) of a rank: `StagedModel.run(stage, ...)` says which one the modules play. A weight
used by two stages of one rank is therefore one parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

from ..models.caches import without_cache
from ..models.dry_run import forward_defaults
from ..models.layer_chain import Unit, numbers_by_module, paths_to
from ..models.skipped_layers import skipping
from ..utils.tensors import tensors_of
from ..utils.transfer import needs_transfer
from .batch.images import without_patches
from .batch.step_inputs import StepInputs
from .checkpointing import Recomputation, run_checkpointed, run_selectively
from .cut.entry import ENTRY
from .cut.survey import Survey
from .encoded_numbers import decode, encode
from .handover import Handover
from .hoisting.layer_calls import LayerCalls
from .hoisting.layer_trace import Trace, TraceEnd, Unfit, context
from .hoisting.reads import HostReads, Unwatchable, Watch
from .hoisting.surroundings import Surroundings
from .in_place import change_class, disable_own_checkpointing, keep_slices, release, show_released, stand_in
from .loss.router_logits import RouterLogits
from .slices.sequence_slices import Payload, SlicedInputs
from .stage_run import StageExit, StageRun
from .stubs import stub_call
from .towers import Towers, is_nothing, nothing_of

PLAIN_CALL = (
    "this model is split into pipeline stages, so it cannot be called directly: one rank holds only some of its "
    "layers. Use\n"
    "    outputs = booster.execute_pipeline(data_iter, model, criterion, optimizer, return_loss=True)\n"
    "with data_iter an iterator over batches and criterion(outputs, inputs) -> loss; leave the optimizer out to "
    "evaluate"
)


class StagedModel:
    """This rank's stages of one model.

    model    cut in place
    survey   facts about it; None when one stage holds all (nothing is cut then, and models that cannot be surveyed
             work)
    stages   units of all stages of the pipeline
    held     indices of the stages of this rank
    checkpointed  layers of the held stages that are recomputed in the backward pass
    routers  whose logits travel to the last stage
    towers   modules that run for images alone; None: there are no images
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        survey: Survey | None,
        stages: Sequence[range],
        held: Sequence[int],
        checkpointed: Recomputation | None = None,
        routers: RouterLogits | None = None,
        towers: frozenset[str] | None = None,
    ) -> None:
        assert survey is not None or len(stages) == 1
        self.model = model
        self.units = tuple(units)
        self.survey = survey
        self.stages = tuple(stages)
        self.held = tuple(held)
        self.checkpointed = checkpointed or Recomputation()
        # Of the thread: layers that a backward recomputes on another one, while a forward runs, play no stage
        # (`two_at_once`).
        self._of_thread = threading.local()
        self.routers = routers
        self.towers = towers
        self.handover = Handover()
        if routers is not None:
            routers.attach(model, lambda: self.current.router_logits if self.current is not None else None)
        self._live: dict[int, frozenset[str]] = {}
        self._released: list[tuple[nn.Module, str, str]] = []  # with the name in the module, and the full name
        self._like = torch.empty(0)
        self._anchor = (model, "")  # a parameter of this rank's: the module that holds it, its name there
        self._defaults = forward_defaults(model)
        self._templates = dict(enumerate(survey.templates)) if survey is not None else {}
        self._towers = Towers(survey) if survey is not None else None
        disable_own_checkpointing(model)
        self._calls: LayerCalls | None = None
        self._around = Surroundings(model, [unit.layer for unit in units])
        # Where the last layer may be left out (of models that are not cut) nothing says where the tail begins.
        self._skips_layers = skipping(model) is not None
        self._reads = HostReads(self._around.state, self._around.unchanged_since) if units else None
        self.answers_on_cpu = False  # reads of a model on the CPU need no other answers: nothing waits there
        if survey is not None and len(stages) > 1:
            self._release_foreign(survey)
            self._install_stubs(survey)
            change_class(model, lambda call, args, kwargs: self._root_call(call, args, kwargs))
            # A module outside the layers that a stage reads may gather its weights, which has to happen as often on
            # every rank.
            between = [stage for stage in held if 0 < stage < len(stages) - 1 and not self._live[stage]]
            self._calls = LayerCalls(model, survey, {stage: stages[stage] for stage in between}, self._around)
        self._install_gates()

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def current(self) -> StageRun | None:
        """What the modules play in the forward that runs."""
        run: StageRun | None = getattr(self._of_thread, "run", None)
        return run

    @current.setter
    def current(self, run: StageRun | None) -> None:
        self._of_thread.run = run

    def run(
        self,
        stage: int,
        received: Payload | None,
        batch: Any,
        tail: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    ) -> tuple[Payload | None, Any]:
        """Forward of `stage`: (what travels to the next stage, None), or on the last stage (None, the model's output).

        `tail` gives, for what the last layer returned, a context for the part of the last stage's forward behind it
        (for None, one for the whole forward: of a model without units, or one that leaves out layers at random).
        """
        return self._run(self._prepared(stage, received, batch), batch, tail)

    def run_microbatch(
        self,
        stage: int,
        received: Payload | None,
        inputs: StepInputs,
        index: int,
        tail: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    ) -> tuple[Payload | None, Any]:
        """The same for microbatch `index` of a step. What comes before the layers is computed once per step where it
        can be.
        """
        run = self._prepared(stage, received, inputs.microbatches[index])
        return self._run_prepared(run, inputs, index, tail)

    def run_slice(self, stage: int, received: Payload | None, inputs: SlicedInputs, index: int) -> Payload:
        """The stage's layers for slice `index` of a step; what comes behind the last of them is left to `run_tail`."""
        units = self.stages[stage]
        if received is not None and not units:  # of the tail alone
            return received
        run = self._prepared(stage, received, inputs.microbatches[index], ends=False)
        run.past = inputs.past(index)
        payload, _ = self._run_prepared(run, inputs, index, nullcontext)
        assert payload is not None
        return payload

    def run_tail(
        self, payload: Payload, inputs: StepInputs, index: int, tail: Callable[[Any], AbstractContextManager[Any]]
    ) -> Any:
        """What comes behind the last layer, for all of microbatch `index`: the model's output."""
        behind = range(len(self.units), len(self.units))
        run = self._prepared(self.num_stages - 1, payload, inputs.microbatches[index], behind)
        _, output = self._run_prepared(run, inputs, index, tail)
        return output

    def _run_prepared(
        self, run: StageRun, inputs: StepInputs, index: int, tail: Callable[[Any], AbstractContextManager[Any]]
    ) -> tuple[Payload | None, Any]:
        stage = run.stage
        if self._calls is not None and not run.is_last:
            calls = self._calls.find(
                stage, run.received, inputs, index, lambda trace, batch: self._trace(run, trace, inputs, index, batch)
            )
            if calls is not None:
                run.in_model, self.current = False, run
                run.applications.start(unit.layer for unit in self.units[: self.stages[stage].start])
                try:
                    run.outputs, alive = self._calls.run(self.stages[stage], calls, run.received, run.wanted, run.past)
                finally:
                    self.current = None
                if alive is None:
                    return self._pack(run), None
                self._calls.distrust(stage, inputs)
                run.in_model, run.received, run.begin = True, dict(sorted(alive.items())), max(alive) + 1
        batch = inputs.batch(index)
        run.watch = self._watch(run, inputs, index, batch)
        result = self._run(run, batch, tail)
        if self._calls is not None:
            self._calls.forward_ran(inputs)
        return result

    def _watch(self, run: StageRun, inputs: StepInputs, index: int, batch: Any) -> Watch | None:
        if self._reads is None or torch.is_inference_mode_enabled():
            return None
        if not (self.answers_on_cpu or needs_transfer(self._own_device())) or self._around.is_watched():
            return None
        metas = tuple((tensor.shape, tensor.dtype) for output in run.received.values() for tensor in tensors_of(output))
        look = (run.stage, run.low, self.current is not None, metas, context(self._own_device()), self._around.modes)
        return self._reads.of_forward(look, inputs, index, batch)

    def _prepared(
        self, stage: int, received: Payload | None, batch: Any, units: range | None = None, ends: bool = True
    ) -> StageRun:
        """What a stage, or `units` of it, plays. ends: the last stage goes on behind its layers."""
        self._follow_device(received)
        units = self.stages[stage] if units is None else units
        is_last = ends and stage == self.num_stages - 1
        run = StageRun(stage, units.start, units.stop, is_last, self._live.get(stage, frozenset()))
        run.begin = min(units.start, units.stop - 1)  # in a stage of the tail alone the unit before it ends
        if self.routers is not None and self.routers.are_wanted(batch):
            passed = self.routers.num_before(units.start)
            run.router_logits = dict(enumerate(received[:passed])) if received is not None else {}
            received = received[passed:] if received is not None else None
        if self.survey is not None:
            run.received, run.told = self._unpack(received, units.start)
            run.templates = self._templates
            run.wanted = frozenset() if is_last else frozenset(self.survey.boundary(units.stop))
        return run

    def _run(
        self, run: StageRun, batch: Any, tail: Callable[[Any], AbstractContextManager[Any]]
    ) -> tuple[Payload | None, Any]:
        with ExitStack() as stack:
            if run.is_last and (not self.units or self._skips_layers):
                stack.enter_context(tail(None))
            elif run.is_last:
                run.enter_tail = lambda output: _discard(stack.enter_context(tail(output)))
            self.current = run
            seen = self._seen_by(run, batch)
            try:
                output = self._watched_call(run, lambda: self._call(seen))
            except StageExit:
                return self._pack(run), None
            finally:
                self.current = None
        if not run.is_last:
            last = self.units[max(run.high - 1, 0)].gate
            raise RuntimeError(
                f"{type(self.model).__name__} returned without running {last}, the end of pipeline stage {run.stage}"
            )
        return None, output

    def call_whole(self, call: Callable[[], Any], given: Any, host: Callable[[], Any]) -> Any:
        """`call` of a model that is not cut, by the entries `given`, of which `host` has what the device has."""
        run = StageRun(0, 0, len(self.units), True, frozenset())
        run.watch = self._watch(run, StepInputs([given], host=lambda: [host()]), 0, given)
        if run.watch is None:
            return call()
        self.current = run
        try:
            return self._watched_call(run, call)
        finally:
            self.current = None

    def _watched_call(self, run: StageRun, call: Callable[[], Any]) -> Any:
        if run.watch is not None:
            try:
                return run.watch.call(call, StageExit)
            except Unwatchable:  # an error of the code's own comes again
                self._reads = run.watch = None
        return call()

    def _trace(self, run: StageRun, trace: Trace, inputs: StepInputs, index: int, batch: Any) -> None:
        self.current = replace(run, trace=trace)
        finds_out = trace.prover is not None or trace.replies  # which looks itself, or knows the answers
        watch = None if finds_out else self._watch(run, inputs, index, batch)
        try:
            with watch.during() if watch is not None else nullcontext(), trace.running():
                self._call(self._seen_by(run, batch))
        except TraceEnd:
            if watch is not None:
                watch.finish()
        except Unfit:
            pass
        except (
            Exception
        ):  # the model's own code, which may check the numbers of stand-ins: what it has called before counts
            pass
        finally:
            self.current = None

    def parameters_of(self, stage: int) -> set[nn.Parameter]:
        """What one of the held stages uses."""
        if self.survey is None:
            return set(self.model.parameters())
        names = {alias for name in self.survey.parameters(self.stages, stage) for alias in self.survey.names[name]}
        return {param for name, param in self.model.named_parameters(remove_duplicate=False) if name in names}

    def _follow_device(self, received: Payload | None) -> None:
        """Released tensors are not moved by `model.to(device)`, but models read their device. A rank without parameters
        is where what it receives is.
        """
        if received:
            self._like = torch.empty(0, dtype=received[0].dtype, device=received[0].device)
        if self._released:
            module, name, _ = self._released[0]
            device = self._own_device()
            if module.__dict__[name].device != device:
                for module, name, _ in self._released:
                    module.__dict__[name] = stand_in(module.__dict__[name], device)

    def _own_device(self) -> torch.device:
        return self._own_param().device

    def _own_param(self) -> torch.Tensor:
        """A parameter that this rank holds, or what has its dtype and device; where it is gets remembered, since
        modules of other stages stand before it.
        """
        module, name = self._anchor
        if module._parameters.get(name) is None:  # the first time, or a parametrization has taken its place
            places = ((module, name) for module in self.model.modules() for name in module._parameters)
            found = next((place for place in places if place[0]._parameters[place[1]] is not None), None)
            if found is None:
                return self._like
            self._anchor = module, name = found
        param = module._parameters[name]
        assert param is not None
        return param

    def _seen_by(self, run: StageRun, batch: Any) -> Any:
        """The batch without the images that only other stages look at."""
        if not self.towers or run.stage == 0 or self.towers & run.live:
            return batch
        if self._towers is not None and self._towers.are_several and self._towers.are_read(self.stages[run.stage]):
            return batch
        return without_patches(batch)

    def _call(self, batch: Any) -> Any:
        run, defaults = self.current, self._defaults
        if run is not None:
            run.applications.start()
        if run is not None and run.past is not None:
            defaults = {**defaults, "past_key_values": run.past}
        if isinstance(batch, Mapping):
            return self.model(**{**defaults, **batch})
        if isinstance(batch, list | tuple):
            return self.model(*batch, **defaults)
        return self.model(batch, **defaults)

    def _pack(self, run: StageRun) -> Payload:
        """Tensors of every unit's output that is read behind the stage, units ascending; last the numbers that units so
        far have returned, if there are any. Before them the logits of all routers so far.

        Numbers travel as a tensor, since what is not data is sent only with the first message of a shape. Reading them
        again waits for the device, which layers that return numbers have done themselves if they computed these on it.
        """
        assert self.survey is not None
        tensors: list[torch.Tensor] = []
        for unit in self.survey.boundary(run.high):
            template = self.survey.template(unit)
            if unit in run.outputs or unit in run.received:
                output = run.outputs[unit] if unit in run.outputs else run.received[unit]
                more = template.take_apart(output, self.units[unit].gate)
            else:  # the batch does not reach the unit
                more = nothing_of(template, self._own_param())
            tensors += more if is_nothing(more) else self.handover.sent(unit, more)
        # those of layers that were called by themselves, or not at all, are those of the dry run
        numbers = [
            number
            for unit in self.survey.numbered(run.high)
            for number in run.told.get(unit, self.survey.template(unit).told)
        ]
        if numbers:
            tensors.append(encode(numbers, next((tensor.device for tensor in tensors), torch.device("cpu"))))
        if run.router_logits is not None:
            tensors[:0] = [logits for _, logits in sorted(run.router_logits.items())]
        return tuple(tensor.contiguous() for tensor in tensors)

    def _unpack(
        self, received: Payload | None, position: int
    ) -> tuple[dict[int, Any], dict[int, list[bool | int | float]]]:
        """By unit what it has returned, and what is told of what units have returned that is not here."""
        assert self.survey is not None
        if received is None:
            return {}, {}
        templates = {unit: self.survey.template(unit) for unit in self.survey.boundary(position)}
        told: dict[int, list[bool | int | float]] = {}
        if numbered := self.survey.numbered(position):
            *tensors, encoded = received
            values = iter(decode(encoded))
            received = tuple(tensors)
            told = {unit: [*islice(values, len(self.survey.template(unit).told))] for unit in numbered}
        found, start = {}, 0
        for unit, template in templates.items():
            whole: Sequence[torch.Tensor] = received[start : start + template.num_tensors]
            whole = whole if is_nothing(whole) else self.handover.received(unit, whole)
            found[unit] = template.build(whole, told.get(unit, ()))
            start += template.num_tensors
        assert start == len(received), (start, len(received))
        return found, told

    def _root_call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.current is None:
            raise RuntimeError(PLAIN_CALL)
        return call(*args, **kwargs)

    def _release_foreign(self, survey: Survey) -> None:
        """Drop the parameters that no stage of this rank reads, and the buffers of layers that it does not run."""
        held = {name for stage in self.held for name in survey.parameters(self.stages, stage)}
        kept = {alias for name in held for alias in survey.names[name]}
        own = {unit for stage in self.held for unit in self.stages[stage]}
        run_here = {self.units[index].layer for index in own}
        foreign = tuple(f"{unit.layer}." for unit in self.units if unit.layer not in run_here)
        for prefix, module in self.model.named_modules():
            path = f"{prefix}." if prefix else ""
            for name, parameter in list(module._parameters.items()):
                if parameter is not None and path + name not in kept:
                    release(module, module._parameters, name)
                    self._released.append((module, name, path + name))
            if path.startswith(foreign):
                for name, buffer in list(module._buffers.items()):
                    if buffer is not None:
                        release(module, module._buffers, name)
                        self._released.append((module, name, path + name))
        for path in {path for _, _, name in self._released for path in paths_to(name.rpartition(".")[0])}:
            module = self.model.get_submodule(path)
            if path and not f"{path}.".startswith(foreign) and next(module.parameters(), None) is None:
                show_released(module, lambda: self.current is not None)

    def cast_released(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """What stands for released parameters gets the dtypes that parameters, by full name, work in: stubs compute
        in them.
        """
        for module, name, full_name in self._released:
            if full_name in dtypes:
                tensor = module.__dict__[name]
                module.__dict__[name] = stand_in(tensor, tensor.device, dtypes[full_name])

    def _install_gates(self) -> None:
        for layer, numbers in numbers_by_module(unit.layer for unit in self.units).items():
            gate = self.units[numbers[0]].gate
            change_class(
                self.model.get_submodule(layer), self._unit_call(layer, numbers, is_layer=True, is_gate=layer == gate)
            )
            if layer != gate:
                change_class(
                    self.model.get_submodule(gate), self._unit_call(gate, numbers, is_layer=False, is_gate=True)
                )
        for name in dict.fromkeys(unit.layer.rpartition(".")[0] for unit in self.units):
            keep_slices(self.model.get_submodule(name))

    def _unit_call(self, name: str, numbers: Sequence[int], *, is_layer: bool, is_gate: bool) -> Callable[..., Any]:
        """numbers: of the units that the calls of the module `name` are."""
        alone, module = cycle(numbers), self.model.get_submodule(name)

        def call_unit(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            run = self.current
            index = next(alone) if run is None else run.applications.next(name, numbers)
            if run is None:  # the model was called by itself
                return self._run_layer(0, index if is_layer and self.num_stages == 1 else -1, call, args, kwargs)
            if run.trace is not None:
                return run.trace.call(index, is_layer, is_gate, call, args, kwargs)
            if is_layer and run.in_model and self._towers is not None:
                self._reach(self._towers, run, name, index)
            if index == 0 and is_layer and run.in_model:
                args, kwargs = self._at_entry(run, args, kwargs)
            if (
                is_gate
                and index < max(run.low, run.begin)
                and run.router_logits is not None
                and self.routers is not None
            ):
                self.routers.replay(index, run.router_logits)
            if is_gate and index < run.begin:
                assert self._towers is not None
                known = self._towers.knows(index, run.received)
                output = run.output_before(index) if known else self._towers.unchanged(index, args, kwargs)
                self._towers.collect(module, args, output)
                return output
            is_here = index >= run.low  # or the end of the layers, before a stage of the tail alone
            if is_here or not is_gate:
                with run.watch.aside() if run.watch is not None and is_layer else nullcontext():
                    output = self._run_layer(run.stage, index - run.low if is_layer else -1, call, args, kwargs)
            else:
                output = run.output_before(index)
            if not is_gate or not run.in_model:
                return output
            if is_here and index in run.templates and run.templates[index].num_numbers:
                run.told[index] = run.templates[index].told_of(output, self.units[index].gate)
            if index in run.wanted and is_here:
                run.outputs[index] = output if index == run.high - 1 else run.templates[index].apart(output)
            if index == run.high - 1:
                if run.watch is not None:
                    run.watch.finish()
                    run.watch.end()
                if not run.is_last:
                    raise StageExit
                if run.enter_tail is not None:
                    enter, run.enter_tail = run.enter_tail, None
                    enter(output)
            return output

        return call_unit

    @staticmethod
    def _reach(towers: Towers, run: StageRun, name: str, index: int) -> None:
        """The model calls the layer of a unit."""
        towers.check_again(name, index, run.reached)
        if not run.is_last and towers.is_passed_over(run.reached, index, run.high):
            raise StageExit
        run.reached = index

    def _at_entry(self, run: StageRun, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """In front of the first layer: the end of a stage without layers, and where the next one puts what it has
        received.
        """
        if run.high and ENTRY not in run.received:
            return args, kwargs
        assert self.survey is not None
        assert self.survey.entry is not None
        if run.high:
            entry = self.survey.entry
            return entry.put(args, kwargs, entry.template.apart(run.received[ENTRY]))
        run.outputs[ENTRY] = self.survey.entry.taken(args, kwargs)
        if run.watch is not None:
            run.watch.finish()
            run.watch.end()
        raise StageExit

    def _run_layer(self, stage: int, place: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the layer at a place of a stage, through activation checkpointing if it is one of those; place -1 is
        no layer.
        """
        whole, selective = self.checkpointed.of(stage)
        if place < 0 or not whole + selective or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        args, kwargs, has_cache = without_cache(args, kwargs, self.model.training)
        if has_cache or place >= whole + selective:
            return call(*args, **kwargs)
        if place < whole:
            return run_checkpointed(call, *args, **kwargs)
        return run_selectively(self.checkpointed.selection, call, *args, **kwargs)

    def _install_stubs(self, survey: Survey) -> None:
        """Replace the modules outside the layers that some stage of this rank must not, or need not, run."""
        for stage in self.held:
            read = survey.modules(self.stages, stage)
            # A module that contains one that is read runs itself.
            self._live[stage] = frozenset(
                name for name in survey.outside if any(m == name or m.startswith(f"{name}.") for m in read)
            )
        unread = {alias for name in survey.unread for alias in survey.names[name]}
        covered: tuple[str, ...] = ()
        for name in survey.outside:
            if name.startswith(covered) or all(name in self._live[stage] for stage in self.held):
                continue
            module = self.model.get_submodule(name)
            own = {f"{name}.{parameter}" for parameter, _ in module.named_parameters(remove_duplicate=False)}
            if own & unread:  # held here because of nothing but its place: real inputs may use it
                continue
            known = name in survey.ran or any(other.startswith(f"{name}.") for other in survey.ran)
            change_class(module, stub_call(name, module, known, lambda: self.current))
            covered += (f"{name}.",)
            if not any(name in self._live[stage] for stage in self.held):
                self._release_statistics(survey, name)

    def _release_statistics(self, survey: Survey, stub: str) -> None:
        """Of a module that runs on other ranks alone, the buffers that it changes there: here they would stay what they
        were, and checkpoints take those of any rank.
        """
        for prefix, module in self.model.get_submodule(stub).named_modules(prefix=stub):
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and f"{prefix}.{name}" in survey.rewritten:
                    release(module, module._buffers, name)
                    self._released.append((module, name, f"{prefix}.{name}"))


def _discard(_: Any) -> None:
    return None
