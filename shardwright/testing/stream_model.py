"""CUDA's streams and events on a CPU: what comes before what, and which access to memory nothing orders.

    with StreamModel() as model:        tensors of the CPU are those of a device with streams
        ... train, save ...
    model.check()                       UnorderedAccess with every hazard

Operations run at once, on the CPU. What is kept beside them is what a GPU would know of their order: a clock for the
host and for every stream, of how far each of the others it is known to be behind (a vector clock). An operation is
behind all earlier ones of its stream and behind what the host had waited for when it launched it; waiting for a stream
or an event adds what that was behind. Two accesses to the same bytes of which one writes must be ordered by this.

    operations   run on the current stream; what touches host memory alone (`utils.streams.host_memory`), on the host
    collectives  run on a stream of their group, behind the current one; `wait()` lets the current stream wait, as NCCL
                 does, and until then their tensors are kept
    reads        of a value (`item`) and blocking copies to the host let the host wait for the current stream
    memory       belongs to the stream that was current when it was made. Let go of, it may be used again by what that
                 stream is given next: what other streams have done with it must come before that, or have been named by
                 `record_stream`

What tensors share with another rank is not looked at, nor what code reads past torch's operators (`numpy`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..comm.compat import schema_of
from ..utils.pytree import TorchDispatchMode, tree_leaves
from ..utils.streams import modelled
from .calls import Call, CallWatch, place_of_call, replaced

HOST = 0  # the host's number among the lines of work
_MOST_SHOWN = 10
_aten = torch.ops.aten
# Give memory, or look at sizes alone.
_NO_ACCESS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "set_", "detach", "lift_fresh"}
_NO_ACCESS |= {"_unsafe_view", "_reshape_alias", "alias", "detach_"}
_HOST_READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "unique_dim", "_unique2"}
_LIKE = {"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full"}


class UnorderedAccess(AssertionError):
    """Memory was read, written or let go of without an order between streams."""


class Hazard(NamedTuple):
    """kind  "read", "write" or "free" """

    kind: str
    message: str

    def __str__(self) -> str:
        return self.message


class _Line:
    """The host or a stream: work that runs in order.

    clock  by line, the number of its last operation that all that comes here is behind
    freed  memory that what comes next here may be given
    """

    def __init__(self, number: int, name: str) -> None:
        self.number, self.name = number, name
        self.clock: dict[int, int] = {number: 0}
        self.freed: list[_Memory] = []

    def join(self, clock: dict[int, int]) -> None:
        for number, time in clock.items():
            if time > self.clock.get(number, 0):
                self.clock[number] = time

    def tick(self) -> int:
        self.clock[self.number] += 1
        return self.clock[self.number]


class Event:
    """As `torch.cuda.Event`."""

    def __init__(self, model: StreamModel, enable_timing: bool = False, **_: Any) -> None:
        self._model = model
        self._clock: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._model.current_stream()
        stream.line.join(self._model.host.clock)
        self._clock = dict(stream.line.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._model.current_stream()).line.join(self._clock)

    def synchronize(self) -> None:
        self._model.host.join(self._clock)

    def query(self) -> bool:
        """The GPU is never behind; who has seen that need not wait."""
        self.synchronize()
        return True


class Stream:
    """As `torch.cuda.Stream`."""

    def __init__(self, model: StreamModel, device: Any = None, priority: int = 0, name: str = "") -> None:
        self._model = model
        self.device = torch.device("cpu")
        self.line = model.new_line(name or f"side stream {len(model.lines)}")

    def wait_stream(self, other: Stream) -> None:
        other.line.join(self._model.host.clock)
        self.line.join(other.line.clock)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._model)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._model.host.join(self.line.clock)

    def query(self) -> bool:
        self.synchronize()
        return True


class _Access(NamedTuple):
    """Of bytes [low, high) by operation `time` of a line."""

    line: int
    time: int
    low: int
    high: int
    writes: bool
    what: str


class _Memory:
    """A storage.

    owner     the line that was current when it was made
    on_host   it is the host's; pinned: and the device copies from it by itself
    recorded  streams named by `record_stream`
    """

    def __init__(self, owner: _Line, on_host: bool = False) -> None:
        self.owner, self.on_host, self.pinned = owner, on_host, on_host
        self.recorded: set[int] = set()
        self.accesses: list[_Access] = []


class StreamModel(CallWatch):
    """See the module. It is what `utils.streams.streams_of` gives for the CPU while it is entered.

    hazards  what has been found, in order
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[_Line] = []
        self.host = self.new_line("the host")
        self.default = Stream(self, name="the default stream")
        self.hazards: list[Hazard] = []
        self.Stream, self.Event = partial(Stream, self), partial(Event, self)
        self._current = local()  # per thread, as in CUDA
        self._memories: dict[int, _Memory] = {}
        self._of_groups: dict[str, Stream] = {}

    def new_line(self, name: str) -> _Line:
        self.lines.append(_Line(len(self.lines), name))
        return self.lines[-1]

    def check(self) -> None:
        """UnorderedAccess if anything was found."""
        if self.hazards:
            shown = dict.fromkeys(hazard.message for hazard in self.hazards)
            more = len(shown) - _MOST_SHOWN
            raise UnorderedAccess(
                f"{len(shown)} accesses that nothing orders:\n"
                + "\n".join(list(shown)[:_MOST_SHOWN])
                + (f"\nand {more} more" if more > 0 else "")
            )

    # What code finds in place of torch.cuda.

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._current, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream or before
        try:
            yield
        finally:
            self._current.stream = before

    def synchronize(self, device: Any = None) -> None:
        for line in self.lines:
            self.host.join(line.clock)

    def is_on_host(self, tensor: Tensor, pinned: bool = True) -> None:
        """`tensor` is memory of the host, and what is made of it alone lies there too."""
        memory = self._memory_of(tensor)
        memory.on_host, memory.pinned = True, pinned

    def holds_on_host(self, tensor: Tensor, pinned: bool = False) -> bool:
        """Whether that has been said of it, or of what it was made of."""
        memory = self._memories.get(tensor.untyped_storage()._cdata) if _has_memory(tensor) else None
        return memory is not None and memory.on_host and (memory.pinned or not pinned)

    # What is seen.

    def __enter__(self) -> Self:
        super().__enter__()
        self._inside.enter_context(modelled(self))
        # torch does not tell its dispatcher of the one, and does nothing about the other on a CPU
        self._inside.enter_context(replaced(torch.UntypedStorage, "resize_", self._resizing))
        self._inside.enter_context(replaced(torch.Tensor, "record_stream", self._recording))
        self._inside.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._memories.clear()  # what is let go of from here on is nobody's concern

    def called(self, call: Call, reads: list[Tensor], writes: list[Tensor]) -> Any:
        stream = self._of_groups.get(call.group)
        if stream is None:
            stream = self._of_groups[call.group] = Stream(self, name=f"the stream of group {call.group}")
        stream.wait_stream(self.current_stream())
        time = stream.line.tick()
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                self._touch(tensor, write, stream.line, time, call.kind)
        return stream.record_event(), reads, writes  # keeps the tensors

    def waited(self, token: Any) -> None:
        self.current_stream().wait_event(token[0])

    def computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        schema = schema_of(func)
        if schema is None:
            return
        name = schema.name.partition("::")[2]
        taken, written = _tensors_of(schema, args, kwargs)
        given = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _has_memory(leaf)]
        if func.is_view or name in _NO_ACCESS:
            for tensor in given:
                self._memory_of(tensor)
            return
        line, on_host = self.current_stream().line, False
        touched = [*taken, *written]
        places = [self._memory_of(tensor).on_host for tensor in touched]
        if _is_of_host(name, touched, places):
            line, on_host = self.host, True
            touched = [tensor for tensor, here in zip(touched, places, strict=True) if here or tensor.dim()]
        if name in _LIKE:
            touched = []
        taken, written = ([each for each in some if any(each is one for one in touched)] for some in (taken, written))
        line.join(self.host.clock)
        time = line.tick()
        for tensor in taken:
            self._touch(tensor, False, line, time, name)
        for tensor in written:
            self._touch(tensor, True, line, time, name)
        known = {tensor.untyped_storage()._cdata for tensor in touched}
        for tensor in given:
            if tensor.untyped_storage()._cdata not in known:
                self._memory_of(tensor).on_host = on_host
                self._touch(tensor, True, line, time, name)
        copies = "copy" in name and any(places) and not _is_non_blocking(schema, args, kwargs)
        if line is not self.host and (name in _HOST_READS or copies):
            self.host.join(line.clock)

    def _touch(self, tensor: Tensor, writes: bool, line: _Line, time: int, what: str) -> None:
        if not tensor.numel() or not _has_memory(tensor):
            return
        memory, (low, high) = self._memory_of(tensor), _bytes_of(tensor)
        new = _Access(line.number, time, low, high, writes, "")
        kept = []
        for old in memory.accesses:
            if old.low >= high or old.high <= low:
                kept.append(old)
                continue
            ordered = line.clock.get(old.line, 0) >= old.time
            if not ordered and (writes or old.writes):
                self._found("write" if writes else "read", memory, old, line, what)
            replaced = low <= old.low and old.high <= high and ((writes and ordered) or old.line == line.number)
            if not (replaced and (writes or not old.writes)):
                kept.append(old)
        memory.accesses = [*kept, new._replace(what=f"{what} at {place_of_call()}")]

    def _found(self, kind: str, memory: _Memory, old: _Access, line: _Line, what: str) -> None:
        done = "written" if old.writes else "read"
        self.hazards.append(
            Hazard(
                kind,
                f"{line.name} may {kind} ({what} at {place_of_call()}) what {self.lines[old.line].name} has not yet "
                f"{done} ({old.what}): let it wait for that",
            )
        )

    # Memory.

    def _memory_of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None:
            line = self.current_stream().line
            memory = self._memories[key] = _Memory(line)
            self._give(line)
            weakref.finalize(storage, self._gone, key).atexit = False
        return memory

    def _give(self, line: _Line) -> None:
        """`line` is given memory: it may be any that was let go of."""
        freed, line.freed = line.freed, []
        for memory in freed:
            for access in memory.accesses:
                if line.clock.get(access.line, 0) < access.time and access.line not in memory.recorded:
                    self.hazards.append(
                        Hazard(
                            "free",
                            f"{line.name} may use memory again that was let go of before "
                            f"{self.lines[access.line].name} was through with it ({access.what}): let it wait before "
                            "the last reference goes, or call record_stream",
                        )
                    )

    def _gone(self, key: int) -> None:
        memory = self._memories.pop(key, None)
        if memory is not None:
            self._let_go(memory)

    def _let_go(self, memory: _Memory) -> None:
        others = any(access.line != memory.owner.number for access in memory.accesses)
        if others and not memory.on_host:  # torch lets pinned memory be until copies have read it
            memory.owner.freed.append(memory)

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            before = storage.nbytes()
            result = resize(storage, size)
            if before != size:
                self._change_memory(storage, before > 0, size > 0)
            return result

        return resized

    def _change_memory(self, storage: torch.UntypedStorage, had: bool, has: bool) -> None:
        """Memory has been taken from a storage, or given to it."""
        old = self._memories.pop(storage._cdata, None)
        if old is not None and had:
            self._let_go(old)
        line = self.current_stream().line
        self._memories[storage._cdata] = _Memory(line, old is not None and old.on_host)
        if has:
            self._give(line)
        if old is None:
            weakref.finalize(storage, self._gone, storage._cdata).atexit = False

    def _recording(self, _: Any) -> Callable[[Tensor, Stream], None]:
        def record_stream(tensor: Tensor, stream: Stream) -> None:
            self._memory_of(tensor).recorded.add(stream.line.number)

        return record_stream


class _Operators(TorchDispatchMode):
    def __init__(self, model: StreamModel) -> None:
        super().__init__()
        self._model = model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "c10d" and not self._model.waits_now:
            self._model.computed(func, args, kwargs, result)
        return result


def _tensors_of(schema: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Of the arguments: what an operator reads, and what it writes to."""
    taken, written = list[Tensor](), list[Tensor]()
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        if value is None:
            continue
        writes = argument.alias_info is not None and argument.alias_info.is_write
        found = [value] if isinstance(value, Tensor) else value if isinstance(value, (list, tuple)) else ()
        (written if writes else taken).extend(each for each in found if isinstance(each, Tensor) and _has_memory(each))
    return taken, written


def _is_of_host(name: str, tensors: list[Tensor], on_host: list[bool]) -> bool:
    """Whether the host computes it, which alone computes with memory of the host; copies go from one to the other.
    Numbers (tensors without dimensions) may come from anywhere.
    """
    wide = [here for tensor, here in zip(tensors, on_host, strict=True) if tensor.dim()]
    return any(wide) if wide and "copy" not in name else bool(on_host) and all(on_host)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


def _is_non_blocking(schema: Any, args: Any, kwargs: Any) -> bool:
    for place, argument in enumerate(schema.arguments):
        if argument.name == "non_blocking":
            return bool(args[place] if place < len(args) else kwargs.get("non_blocking"))
    return False


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """[low, high) of the storage that a tensor reaches."""
    low = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low * tensor.itemsize, int(low + last + 1) * tensor.itemsize
