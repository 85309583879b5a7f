"""What a model reads off tensors outside of its layers, answered by the host: on a device every such read waits for it.

[Note: answers from the host]
transformers looks at masks and positions to choose a kernel (`if mask.all()`), in the forward of every microbatch on
the first and the last stage (those between call their layers without the model, see `layer_trace`). What it reads
follows from entries of the batch that the host still has. So one forward is *recorded*: the operators outside of layers
that made what was read are written down. In later forwards with equal shapes and an unchanged model, the same operators
run on the host, for this microbatch's entries, and the model gets that answer without a look at the device. Which read
comes next may depend on the answers so far, so recordings make a tree.

Only whole numbers and truth values are computed this way, which are the same on every device. A forward in which
something is read that follows from anything else (what arrived from the stage before, outputs of layers, parameters,
buffers, random numbers, other ranks) reads for itself, as do layers and what is behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...utils import pytree
from ..batch.microbatch import items_of
from ..batch.step_inputs import StepInputs
from ..operators import PAST_OPERATORS, reads_data, tensors_in, written_by
from .layer_trace import storage_of
from .model_state import drew_others, other_random_states

_MOST_FRAMES = 256
_MOST_FAILURES = 32  # without a success between them
_MOST_TRIES = 8
_OWN_RESULTS = ("aten", "prims")  # namespaces of operators that compute from their arguments alone
# Tensors made outside of operators; views that depend on how a tensor lies in memory.
_BY_STORAGE = (torch.ops.aten.lift_fresh.default, torch.ops.aten.as_strided.default)
_Path = tuple[Any, ...]


class _Place(NamedTuple):
    """Stands for a tensor: an entry of the batch, or the `number`-th result."""

    key: Any
    number: int


class _Operator(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[_Place, ...]

    @property
    def places(self) -> Iterator[_Place]:
        return _places_in((self.args, tuple(self.kwargs.values()), self.results))


class _Read(NamedTuple):
    """How the host comes to an answer: `operators`, the last of which reads. kind: of the answer."""

    operators: tuple[_Operator, ...]
    kind: type

    def answer(self, entries: Mapping[Any, torch.Tensor]) -> Any:
        values: dict[_Place, torch.Tensor] = {}

        def of(part: Any) -> Any:
            if isinstance(part, _Place):
                return values[part] if part in values else entries[part.key]
            if isinstance(part, list | tuple):
                return type(part)(map(of, part))
            return torch.device("cpu") if isinstance(part, torch.device) else part

        with torch.no_grad():
            for operator in self.operators:
                output = operator.func(
                    *map(of, operator.args), **{name: of(value) for name, value in operator.kwargs.items()}
                )
                values.update(zip(operator.results, tensors_in([output]), strict=True))
        return self.kind(output)


class _Known:
    """What is known of forwards with equal shapes, on one state of the model.

    reads    the next one by the answers before it; None: it follows from something else, and the model reads for itself
    calls    functions of torch that the model called since the read before, by the same; others mean that it has gone
             another way
    readers  functions by which the model asked
    ends     answers after which the last layer was reached
    tries    recordings so far
    is_lost  whether a forward has gone where nobody was before
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self.tries = 0
        self.is_lost = False
        self.reads: dict[_Path, _Read | None] = {}
        self.calls: dict[_Path, list[Any]] = {}
        self.readers: set[Any] = set()
        self.ends: set[_Path] = set()

    def follow(self, path: _Path, entries: Mapping[Any, torch.Tensor]) -> _Path:
        """`path` and the answers that the host knows behind it."""
        while (read := self.reads.get(path)) is not None:
            path += (read.answer(entries),)
        return path


class HostReads:
    """What the forwards of a rank's stages read.

    state      of the model: what a script can turn between steps, and the model in a forward
    unchanged  whether the model is in a state still
    """

    def __init__(self, state: Callable[[], Any], unchanged: Callable[[Any], bool]) -> None:
        self._state, self._unchanged = state, unchanged
        self._known: dict[Hashable, _Known] = {}
        self._failures = 0  # recordings that told nothing

    def of_forward(self, look: Hashable, inputs: StepInputs, index: int, batch: Any) -> Watch | None:
        """For a forward of a microbatch, which the model gets as `batch`. `look` is equal for forwards that run
        alike but for the batch.
        """
        if self._failures >= _MOST_FAILURES or not inputs.has_host:
            return None
        key = (look, inputs.frame(index))
        known = self._known.get(key)
        if known is None or not self._unchanged(known.state):
            if len(self._known) >= _MOST_FRAMES:
                self._known.clear()
            known = self._known[key] = _Known(self._state())
        if known.tries >= _MOST_TRIES and (known.is_lost or not known.ends):
            return None
        entries = {name: value for name, value in items_of(inputs.on_host(index)) if isinstance(value, torch.Tensor)}
        path = known.follow((), entries)
        if not known.is_lost and (path in known.ends or path in known.reads):
            return Watch(known, entries, path)
        known.tries += 1
        if known.tries > _MOST_TRIES:
            return None
        self._failures += 1
        return Recording(known, batch, self._succeeded)

    def _succeeded(self) -> None:
        self._failures = 0


class Unwatchable(Exception):
    """What was watched has failed, which may be because it was."""


class Watch(TorchFunctionMode):
    """Answers what is known. Active between `begin` and `end`, but not inside of `aside`."""

    def __init__(self, known: _Known, entries: Mapping[Any, torch.Tensor], answers: _Path) -> None:
        super().__init__()
        self._known, self._entries, self._answers = known, entries, answers
        self._path: _Path = ()
        self._since: list[Any] = []  # functions called since the last read
        self.is_active = False
        self._is_lost = False  # on a path that nobody has recorded

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_lost:
            return func(*args, **(kwargs or {}))
        self._since.append(func)
        if func not in self._known.readers:
            return func(*args, **(kwargs or {}))
        if self._path in self._known.calls and self._since != self._known.calls[self._path]:
            self._is_lost = self._known.is_lost = True  # the next forward is recorded
            return func(*args, **(kwargs or {}))
        self._since = []
        place = len(self._path)
        if place < len(self._answers):
            answer = self._answers[place]
            self._path += (answer,)
            return answer
        answer = func(*args, **(kwargs or {}))
        if self._path in self._known.reads:
            self._path = (*self._path, _noted(answer))
            self._answers = self._known.follow(self._path, self._entries)
        else:
            self._is_lost = self._known.is_lost = True
        return answer

    def begin(self) -> None:
        self.is_active = True
        self.__enter__()

    def end(self) -> None:
        if self.is_active:
            self.is_active = False
            self.__exit__(None, None, None)

    def finish(self) -> None:
        """The last layer has been reached."""

    def call(self, call: Callable[[], Any], exit: type[Exception]) -> Any:
        """What `call` returns, `exit` if it raises that; Unwatchable for code that runs under no mode."""
        with self.during():
            try:
                return call()
            except exit:
                raise
            except Exception as error:
                if self.is_active:  # not in a layer, or behind the last one
                    raise Unwatchable from error
                raise

    @contextmanager
    def during(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Layers run as if nobody watched. After an error nobody watches any more."""
        was_active = self.is_active
        self.end()
        yield
        if was_active:
            self.begin()


class Recording(Watch):
    """Writes down what is read, and how it was computed."""

    def __init__(self, known: _Known, batch: Any, on_success: Callable[[], None]) -> None:
        super().__init__(known, {}, ())
        known.is_lost = False
        self._on_success = on_success
        self._operators = _Operators(batch)
        self._reads: dict[_Path, _Read | None] = {}
        self._calls: dict[_Path, list[Any]] = {}
        self._asked: set[Any] = set()
        self._randoms = other_random_states()
        self._holds = True

    def begin(self) -> None:
        super().begin()
        self._operators.__enter__()

    def end(self) -> None:
        if self.is_active:
            self._operators.__exit__(None, None, None)
        super().end()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = len(self._operators.reads)
        self._since.append(func)
        output = func(*args, **(kwargs or {}))
        reads = self._operators.reads[before:]
        if func in PAST_OPERATORS:
            reads = [None]
            self._holds &= func is torch.Tensor.tolist  # an array can be read later
        if reads and func not in self._known.readers:
            self._holds &= func not in self._asked  # these were not counted
            self._known.readers.add(func)
            self._known.reads.clear()
        self._asked.add(func)
        if func in self._known.readers:
            operators = reads[0] if len(reads) == 1 and isinstance(output, bool | int) else None
            self._reads[self._path] = None if operators is None else _Read(operators, type(output))
            self._calls[self._path], self._since = self._since, []
            self._path += (_noted(output),)
        return output

    def finish(self) -> None:
        if self._holds and not drew_others(self._randoms):
            self._known.reads.update(self._reads)
            self._known.calls.update(self._calls)
            self._known.ends.add(self._path)
            self._on_success()


class _Operators(pytree.TorchDispatchMode):
    """Writes down operators on what follows from the batch.

    reads  for every read the operators that lead to it; None where it follows from something else

    Tensors are known by where they lie: the object that autograd gives to the model for a view is another one than
    operators return.
    """

    def __init__(self, batch: Any) -> None:
        super().__init__()
        self.reads: list[tuple[_Operator, ...] | None] = []
        self._kept: list[torch.Tensor] = []  # so that storages keep their addresses
        self._places: dict[Hashable, _Place] = {}
        self._storages: dict[_Place, int] = {}
        self._unknown: set[int] = set()  # storages that something else was written to
        self._written: list[_Operator] = []
        for key, value in items_of(batch):
            if isinstance(value, torch.Tensor):
                self._put(value, _Place(key, -1))
        self._entries = set(self._storages.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        given, found = list(tensors_in((*args, *kwargs.values()))), list(tensors_in([output]))
        # What was written to at the address of new memory is gone: gathered weights, say.
        self._unknown -= set(map(storage_of, found)) - set(map(storage_of, given))
        is_explained = (
            func.namespace in _OWN_RESULTS
            and func not in _BY_STORAGE
            and torch.Tag.nondeterministic_seeded not in func.tags
            and all(map(self._is_known, given))
            and not any(tensor.is_floating_point() or tensor.is_complex() for tensor in found)
        )
        written = set(map(storage_of, written_by(func, args, kwargs)))
        if written and (not is_explained or written & self._entries):
            self._unknown |= written
            is_explained = False
        operator = self._write_down(func, args, kwargs, found) if is_explained else None
        if reads_data(func, args):
            self.reads.append(None if operator is None else self._leading_to(operator))
        return output

    def _put(self, tensor: torch.Tensor, place: _Place) -> None:
        self._kept.append(tensor)
        self._places[_geometry(tensor)] = place
        self._storages[place] = storage_of(tensor)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) not in self._unknown and _geometry(tensor) in self._places

    def _write_down(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[torch.Tensor]
    ) -> _Operator:
        def noted(part: Any) -> Any:
            if isinstance(part, torch.Tensor):
                return self._places[_geometry(part)]
            return type(part)(map(noted, part)) if isinstance(part, list | tuple) else part

        given = tuple(map(noted, args)), {name: noted(value) for name, value in kwargs.items()}
        for tensor in found:
            if _geometry(tensor) not in self._places:
                self._put(tensor, _Place(None, len(self._kept)))
        operator = _Operator(func, *given, tuple(self._places[_geometry(tensor)] for tensor in found))
        self._written.append(operator)
        return operator

    def _leading_to(self, last: _Operator) -> tuple[_Operator, ...]:
        """Those before it that made, or wrote to, the memory that it looks at."""
        needed, chosen = set[int](), [last]
        needed.update(self._storages[place] for place in last.places)
        for operator in reversed(self._written[:-1]):
            storages = {self._storages[place] for place in operator.places}
            touched = (
                storages if operator.func._schema.is_mutable else {self._storages[place] for place in operator.results}
            )
            if touched & needed:
                chosen.append(operator)
                needed |= storages
        return tuple(reversed(chosen))


def _geometry(tensor: torch.Tensor) -> Hashable:
    return storage_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _places_in(part: Any) -> Iterator[_Place]:
    if isinstance(part, _Place):
        yield part
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from _places_in(inner)


def _noted(answer: Any) -> Any:
    """What Python can see of an answer."""
    if isinstance(answer, torch.Tensor):
        return answer.shape
    if isinstance(answer, list | tuple):
        return tuple(map(_noted, answer))
    return answer if isinstance(answer, bool | int | float) else None
