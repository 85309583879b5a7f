"""With what a model calls its layers: masks, positions, rotary tables. Found without running a layer, used for all that
would get the same.

[Note: calling layers without the model]
A stage between the first and the last runs some layers on what arrived. What else the layers get, the model computes
before them, from the batch; it is the same for every stage, and for every microbatch whose batch is the same where that
computation looked. So the model's forward runs once per group of such microbatches, as a *trace*: every layer hands
back a stand-in and its arguments are written down. Then the stages of this rank call their layers themselves.

That is right only if all that the model does between its layers is to hand on what they returned. The trace proves it,
operator by operator. *Tainted* are the stand-ins, what modules of other stages would return, random numbers, and all
that is computed from these.

    an argument that is a stand-in itself      flows: replaced by what the layer before returned
    one that is not tainted                    a constant of the group
    one that is tainted, or needs a gradient   the stage is run by the model's forward, as without traces
    a number or shape read from what is tainted    the same, since the model may go another way next time

A proof holds for one path through the model's Python. What turns it is what the model reads off tensors
(`if mask.all()`); these answers are kept, with the functions of torch that it calls, and other contents of equal shapes
whose trace gets the same answers from the same calls need no second look at operators.

It also ends so where the forward changes something that layers could see other than their arguments (attributes, hooks,
autocast), or that its next call could see (a counter, rotary frequencies that follow the longest batch so far), or its
batch, or random numbers that torch does not keep. Attributes are looked into by one level: lists, dicts, generators,
objects of the model's own. What a forward leaves in globals for its layers or its next call goes unseen. A buffer that
it fills anew before it reads it is none of these. Which entries of the batch were looked at is noted on the way:
microbatches that differ elsewhere, in token ids for example, form one group. A trace leaves the model and the random
numbers as they were. What it found lives for one step.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...models.caches import is_past
from ...utils import pytree
from ...utils.tensors import tensors_of
from ..batch.microbatch import items_of
from ..cut.entry import ENTRY, Entry
from ..cut.template import TENSOR, Template
from ..operators import PAST_OPERATORS, reads_data, tensors_in, written_by
from .model_state import other_random_states, random_states, restore_other_random_states

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
_MOST_PATHS = 256  # of models that read ever new numbers


class Unfit(BaseException):
    """This stage cannot call its layers itself; the model's forward has to. Not for the model to catch, which may
    try something else.
    """


_HOOKS = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)


class TraceEnd(BaseException):
    """Leaves the model's forward where a trace knows enough."""


class LayerCall(NamedTuple):
    """Arguments of one layer; at the places of `flows` stands the tensor (unit, number) of what a unit returned, at
    those of `pasts` what came before the slice."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arg_flows: tuple[tuple[int, int, int], ...]
    kwarg_flows: tuple[tuple[str, int, int], ...]
    constants: tuple[tuple[torch.Tensor, int], ...]  # with their versions: a layer may write to what it gets
    pasts: tuple[int | str, ...] = ()

    @property
    def sources(self) -> set[int]:
        """Units whose outputs the layer gets."""
        return {unit for _, unit, _ in (*self.arg_flows, *self.kwarg_flows)}

    def filled(
        self, tensors: Mapping[int, Sequence[torch.Tensor]], past: Any = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arguments for one microbatch; `tensors` are those of the units' outputs."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for key in self.pasts:
            if isinstance(key, int):
                args[key] = past
            else:
                kwargs[key] = past
        for place, unit, number in self.arg_flows:
            args[place] = tensors[unit][number]
        for name, unit, number in self.kwarg_flows:
            kwargs[name] = tensors[unit][number]
        return args, kwargs


class Proof:
    """What is known of traces with equal shapes, on one state of the model.

    state    of the model when it was traced
    paths    wanted units, the functions that the model called, and the answers that it got, of traces that were proven
    readers  functions by which it asked
    read     keys of the batch's entries that it looks at
    known    answers by the contents of these entries
    by_state whether answers follow from something else as well
    draws    whether it draws random numbers before its layers
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.paths: set[tuple[Any, ...]] = set()
        self.readers: set[Any] = {torch.Tensor.tolist}
        self.draws = False
        self.by_state = False
        self.known: dict[Hashable, tuple[Any, ...]] = {}
        self.read: frozenset[Any] = frozenset()


class Trace:
    """One forward of the model without its layers.

    templates  of what units, and the entry, return
    entry    of the layers; where it has arrived, the first one gets it
    first    from this unit on the layers' calls are followed
    wanted   units whose arguments are looked for
    sources  tensors that arrived for a stage, by unit. Those of the last one are what layers are assumed to return
    batch    as the model gets it
    proof    of earlier traces, to which this one is compared
    prove    whether to extend it
    replies  answers that are known already; the model gets them without a look at the device
    """

    def __init__(
        self,
        templates: Mapping[int, Template],
        entry: Entry | None,
        first: int,
        wanted: frozenset[int],
        sources: Mapping[int, Sequence[torch.Tensor]],
        batch: Any,
        proof: Proof,
        prove: bool,
        replies: Sequence[Any] = (),
    ) -> None:
        self.calls: dict[int, LayerCall] = {}
        self.proof = proof
        self.answers: list[Any] = []
        self.asked: list[Any] = []  # functions of torch that the model has called, in their order
        self.replies = replies
        self.paused = False
        self.is_complete = False  # the last wanted unit was reached
        self.prover = _Prover(self, batch) if prove else None
        self.device = sources[max(sources)][0].device
        self._templates = templates
        self._entry = entry if ENTRY in sources else None
        self._first = first
        self._wanted = wanted
        self._last = max(wanted)
        self._sources = sources
        self._arrived = sorted(sources)
        self._stand_ins: dict[int, Any] = {}
        self._before: dict[int, Any] = {}  # what units before the first one are taken to return
        self._places: dict[int, tuple[int, int]] = {}  # id of a stand-in's tensor -> unit, number
        self._kept: list[torch.Tensor] = []  # ids stay valid
        self._next = first
        self._context = context(self.device)

    @property
    def is_proven(self) -> bool:
        """Whether it has gone all the way on a path that is known."""
        return self.is_complete and self._path in self.proof.paths

    @property
    def _path(self) -> tuple[Any, ...]:
        return (self._wanted, tuple(self.asked), *self.answers)

    def disprove(self) -> None:
        """It went well, and yet has left something behind."""
        self.calls.clear()
        self.proof.paths.discard(self._path)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the model's forward is traced. Random numbers are as before when it is left."""
        if self.prover is None:
            states = random_states(self.device) if self.proof.draws else []
            try:
                with _Answers(self):
                    yield
            finally:
                for restore, state in states:
                    restore(state)
            return
        outside = other_random_states()
        try:
            with _Answers(self), self.prover:
                yield
        finally:
            for restore, state in self.prover.states:
                restore(state)
                self.proof.draws = True
            if self.is_complete and not self.prover.unexplained:
                if len(self.proof.paths) >= _MOST_PATHS:
                    self.proof.paths.clear()
                self.proof.paths.add(self._path)
            if restore_other_random_states(outside):
                self.disprove()

    def stub(self, compute: Callable[[], Any], given: Any = ()) -> Any:
        """What a module outside the layers returns whose output other stages read: of the right shape, without a
        meaning, except for what it was given.
        """
        with self._aside():
            output = compute()
            if self.prover is not None:
                known = {id(tensor) for tensor in tensors_of(given)}
                for tensor in tensors_of(output):
                    if id(tensor) not in known:
                        self.prover.taint(tensor)
        return output

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is called inside, the model does not call."""
        paused, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = paused

    def call(
        self,
        unit: int,
        is_layer: bool,
        is_gate: bool,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A unit is called by the model."""
        if unit < self._first and (known := self._before.get(unit, self)) is not self:
            return known
        if unit >= self._first and not is_layer:
            return call(*args, **kwargs)  # the layers in it follow
        with self._aside():
            return self._reached(unit, is_gate, args, kwargs)

    def _reached(self, unit: int, is_gate: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if unit < self._first:
            place = bisect_left(self._arrived, unit)
            output = self._stand_in(self._arrived[place])
            for number in range(self._arrived[place - 1] + 1 if place else 0, self._arrived[place] + 1):
                self._before[number] = output
            return output
        if not is_gate or unit != self._next:
            raise Unfit
        self._next = unit + 1
        if unit in self._wanted:
            if context(self.device) != self._context:
                raise Unfit
            if unit == 0 and self._entry is not None:
                args, kwargs = self._entry.put(args, kwargs, self._stand_in(ENTRY))
            self.calls[unit] = self._written_down(args, kwargs)
        if unit == self._last:
            self.is_complete = True
            raise TraceEnd
        return self._stand_in(unit)

    def _stand_in(self, unit: int) -> Any:
        """In place of what a unit returns: the structure that it had in the dry run, around tensors of the shapes
        that arrived.
        """
        if unit not in self._stand_ins:
            source, template = unit if unit in self._sources else max(self._sources), self._templates[unit]
            if template.num_numbers or template.num_tensors != len(self._sources[source]):
                raise Unfit
            tensors = self.stub(lambda: [_like(tensor) for tensor in self._sources[source]])
            self._kept += tensors
            if self.prover is not None:
                self.prover.flows.update(map(storage_of, tensors))
            for number, tensor in enumerate(tensors):
                self._places[id(tensor)] = (unit, number)
            remaining = iter(tensors)
            leaves = [next(remaining) if other is TENSOR else other for other in template.others]
            self._stand_ins[unit] = pytree.tree_unflatten(leaves, template.spec)
        return self._stand_ins[unit]

    def _written_down(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        constants: list[tuple[torch.Tensor, int]] = []
        arg_flows = [(place, *self._places[id(value)]) for place, value in enumerate(args) if id(value) in self._places]
        kwarg_flows = [(name, *self._places[id(value)]) for name, value in kwargs.items() if id(value) in self._places]
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        pasts = tuple(key for key, value in named if is_past(value))

        def is_filled(value: Any) -> bool:
            return id(value) in self._places or is_past(value)

        for value in (*args, *kwargs.values()):
            if not is_filled(value):
                self._check_constant(value, constants)
        fixed_args = tuple(None if is_filled(value) else value for value in args)
        fixed_kwargs = {name: None if is_filled(value) else value for name, value in kwargs.items()}
        return LayerCall(fixed_args, fixed_kwargs, tuple(arg_flows), tuple(kwarg_flows), tuple(constants), pasts)

    def _check_constant(self, value: Any, found: list[tuple[torch.Tensor, int]]) -> None:
        if isinstance(value, torch.Tensor):
            if value.requires_grad or (self.prover is not None and self.prover.look(value)):
                raise Unfit
            found.append((value, value._version))
        elif isinstance(value, tuple):
            for part in value:
                self._check_constant(part, found)
        elif not isinstance(value, _PLAIN):
            raise Unfit  # lists, caches: layers may change them


class _Prover(pytree.TorchDispatchMode):
    """Follows what is tainted through the operators of a trace.

    read         keys of the batch's entries that were looked at
    flows        storages of the stand-ins, whose contents layers return
    defined      storages of buffers that the model fills before it reads them
    by_state     whether something was read off a tensor that neither comes from the batch nor from the trace: a
                 parameter, a buffer
    states       of random numbers before the first draw
    reads        number of times that something was read off a tensor
    unexplained  whether that was done by means that a trace without proof would not see
    """

    def __init__(self, trace: Trace, batch: Any) -> None:
        super().__init__()
        self.read: set[Any] = set()
        self.flows: set[int] = set()
        self.defined: set[int] = set()
        self.by_state = False
        self.states: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []
        self.reads = 0
        self.unexplained = False
        self._trace = weakref.proxy(trace)  # which holds this one: activations must not wait for a garbage collection
        self._entries: dict[int, set[Any]] = {}  # entries may share one storage
        for key, value in items_of(batch):
            for leaf in tensors_of(value):
                self._entries.setdefault(storage_of(leaf), set()).add(key)
        self._batch = batch  # addresses stay valid while the tensors live
        self._tainted: set[int] = set()
        self._made: set[int] = {0}  # in the trace; nothing is at address 0
        # computed from, or read as, what is neither made in the trace nor given by the batch
        self._of_state: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._trace.paused or func.is_view:  # a view is of the same storage, so what reads it is seen
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): made outside of operators
            self._make(args[0])
            return func(*args, **kwargs)
        tags = func.tags
        if func._schema.is_mutable:
            self._check_written(func, args, kwargs)
        tainted = torch.Tag.nondeterministic_seeded in tags
        if tainted and not self.states:
            self.states = random_states(self._trace.device)
        by_state = False
        for tensor in tensors_in((*args, *kwargs.values())):
            tainted |= self.look(tensor)
            by_state |= storage_of(tensor) in self._of_state
        output = func(*args, **kwargs)
        reads = reads_data(func, args)
        self.reads += reads
        self.by_state |= reads and by_state
        found = list(tensors_in([output]))
        for tensor in found:
            self._make(tensor)
        if func._schema.is_mutable:
            found += tensors_in(args)
        if by_state:
            self._of_state.update(map(storage_of, found))
        if tainted:
            if reads or not found:
                raise Unfit
            for tensor in found:
                self.taint(tensor)
        return output

    def look(self, tensor: torch.Tensor) -> bool:
        """Note that the model computes with `tensor`; whether it is tainted."""
        storage = storage_of(tensor)
        if storage in self._entries:
            self.read |= self._entries[storage]
        elif storage not in self._made:
            self._of_state.add(storage)
        return storage in self._tainted

    def taint(self, tensor: torch.Tensor) -> None:
        self._tainted.add(storage_of(tensor))
        self._make(tensor)

    def note_read(self, tensor: torch.Tensor) -> None:
        self.by_state |= storage_of(tensor) in self._of_state

    def _make(self, tensor: torch.Tensor) -> None:
        storage = storage_of(tensor)
        if storage not in self._entries and storage not in self._of_state:  # an operator may return its argument
            self._made.add(storage)
        self._kept.append(tensor)

    def _check_written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Unfit, before anything is written, where the write would go unseen (outputs of layers) or outlive the
        trace (batch, buffers).
        """
        for tensor in written_by(func, args, kwargs):
            storage = storage_of(tensor)
            if storage in self.flows:
                raise Unfit
            if storage in self._made:
                continue
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            if (
                func is not torch.ops.aten.copy_.default
                or not whole
                or storage in self._entries
                or storage in self._of_state
            ):
                raise Unfit
            self.defined.add(storage)
            self._made.add(storage)


class _Answers(TorchFunctionMode):
    """Keeps what the model reads off tensors during a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        trace, prover = self._trace, self._trace.prover
        if trace.paused:
            return func(*args, **(kwargs or {}))
        if func in _HOOKS:  # on what a layer returns, in a backward that only the model's own forward makes
            raise Unfit
        trace.asked.append(func)
        if prover is not None:
            before = prover.reads
            if func in PAST_OPERATORS:
                prover.unexplained |= func is not torch.Tensor.tolist
                if prover.look(args[0]):
                    raise Unfit
                prover.note_read(args[0])
        place = len(trace.answers)
        if (
            place < len(trace.replies)
            and func in trace.proof.readers
            and isinstance(trace.replies[place], bool | int | float)
        ):
            trace.answers.append(trace.replies[place])
            return trace.replies[place]
        output = func(*args, **(kwargs or {}))
        if prover is not None and prover.reads != before:
            trace.proof.readers.add(func)
        if func in trace.proof.readers:
            trace.answers.append(_answer(output))
        return output


def _answer(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.shape
    if isinstance(output, list | tuple):
        return tuple(_answer(part) for part in output)
    return output if isinstance(output, _PLAIN) else None


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Shape, dtype and device of `tensor`, in the memory of one element."""
    made = torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
    return made.requires_grad_() if tensor.requires_grad else made


def context(device: torch.device) -> tuple[Any, ...]:
    """What layers see of the world beside their arguments."""
    autocast = torch.is_autocast_enabled(device.type)
    return torch.is_grad_enabled(), autocast, torch.get_autocast_dtype(device.type) if autocast else None
