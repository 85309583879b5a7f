"""Activations that wait in host memory between the forward and the backward of a microbatch.

    with offload.taking(key):      F of a microbatch that is to leave
        forward()
    offload.start(key)             OFFLOAD: its activations are copied to the host
    offload.compute_begins()       before every compute action: lets go of what was copied while the last one ran
    offload.fetch(key)             RELOAD: they are copied back
    offload.wait(key)              before its B or I

[Note: what leaves]
What autograd saves during F, storage by storage: a storage is copied once, whole, however many views of it are saved
(queries, keys and values of one projection). It leaves if nothing but the graph of this microbatch holds it, because
only then it is memory that becomes free: parameters, buffers, the batch, masks that are made once per step, and the
tensors that travel between stages stay, as does what a module keeps on itself. So do storages of less than SMALLEST
bytes, which are not worth a copy. Inputs of recomputed layers are saved like anything else, and leave, as far as they
are positional arguments.

[Note: who waits for whom]
Copies run on two streams, one per direction, behind what was being computed when they were asked for. The computation
waits for a copy out before it lets go of the memory, one compute action later, and for a copy back before the backward.
Both are events on streams: the host never waits, and so what is freed when does not depend on how far ahead it is.
Memory is taken and given back on the stream of the computation alone. On a CPU the same copies are plain ones.

[Note: edits in place]
A hook on saved tensors takes over from torch the check that they are what they were. A tensor that was edited in F
after it was saved stays, and its backward raises what torch would; once a storage is about to leave, nobody else holds
it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..comm.compat import storage_users
from ..utils.streams import host_memory, streams_of
from .saved_bytes import note_checkpointed

SMALLEST = 1 << 16
BLOCK = 1 << 24  # bytes; torch rounds pinned memory up to a power of two
_ALIGNED = 64

_EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: [{kind} {shape}] "
    "is at version {now}; expected version {then} instead."
)


class _Saved:
    """A saved tensor.

    tensor   an alias; None from OFFLOAD on, if it leaves
    memory   that comes back in its place; None if it stays
    """

    __slots__ = ("__weakref__", "look", "memory", "tensor", "version")

    def __init__(self, tensor: Tensor, memory: _Memory | None) -> None:
        # else an alias is one user of the memory more, and an output would keep its own graph
        alone = memory is None and tensor.is_leaf
        self.tensor: Tensor | None = tensor if alone else tensor.detach()
        self.version = tensor._version
        self.memory = memory
        if memory is not None:
            self.look = (tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    @property
    def is_edited(self) -> bool:
        return self.tensor is not None and self.tensor._version != self.version


class _Memory:
    """A storage that autograd has saved tensors of.

    views   these, as long as the graph needs them
    flat    [bytes], where it has come back
    parts   of blocks, one after another, that it was copied to
    """

    __slots__ = ("__weakref__", "flat", "num_bytes", "parts", "views")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.views: list[weakref.ref[_Saved]] = []
        self.flat: Tensor | None = None
        self.parts: list[Tensor] = []

    def leave(self) -> Tensor | None:
        """Its bytes, which no view holds any longer; None where it has to stay."""
        views = [view for reference in self.views if (view := reference()) is not None]
        if not views or any(view.is_edited for view in views):
            return None
        tensor = views[0].tensor
        assert tensor is not None
        if storage_users(tensor) != len(views):
            return None
        for view in views:
            view.tensor = None
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class _Block(NamedTuple):
    """BLOCK bytes of host memory; at the event `read` a copy from it has ended."""

    room: Tensor
    read: Any = None


class _Away(NamedTuple):
    """What has left of one microbatch, and the event at which it had."""

    memories: list[weakref.ref[_Memory]]
    blocks: list[_Block]
    written: Any


class _Leaving(NamedTuple):
    """Memory that is being copied since the compute action with this number."""

    flats: list[Tensor]
    action: int
    written: Any


class _Lane:
    """Copies in one direction, in order, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._stream = None if self._streams is None else self._streams.Stream(device)

    def copy(self, to: list[Tensor], source: list[Tensor], after: list[Any]) -> Any:
        """Begin when what was asked to be computed so far is done, and the events `after` are past; returns the
        event of the end.
        """
        if self._stream is None:
            torch._foreach_copy_(to, source)
            return None
        self._stream.wait_stream(self._streams.current_stream(self._stream.device))
        for event in after:
            self._stream.wait_event(event)
        with self._streams.stream(self._stream):
            torch._foreach_copy_(to, source, non_blocking=True)
            return self._stream.record_event()

    def hold_up(self, event: Any) -> None:
        """What is computed from now on waits for a copy."""
        if self._stream is not None:
            self._streams.current_stream(self._stream.device).wait_event(event)

    def hold_up_for_all(self) -> None:
        if self._stream is not None:
            self._streams.current_stream(self._stream.device).wait_stream(self._stream)


class ActivationOffload:
    """See the module. Keys name microbatches of a stage."""

    def __init__(self) -> None:
        self._taken: dict[Hashable, dict[int, weakref.ref[_Memory]]] = {}  # by storage, since F
        self._leaving: list[_Leaving] = []
        self._away: dict[Hashable, _Away] = {}
        self._arriving: dict[Hashable, Any] = {}
        self._free: list[_Block] = []  # with those that are away as many as were ever needed at once, in all steps
        self._begun = 0  # compute actions
        self._device = torch.device("cpu")
        self._lanes: tuple[_Lane, _Lane] | None = None  # out and back

    @contextmanager
    def taking(self, key: Hashable) -> Iterator[None]:
        """What autograd saves in here belongs to `key`."""
        found = self._taken[key] = {}

        def pack(tensor: Tensor) -> _Saved:
            note_checkpointed(tensor)  # hooks outside of these do not see it
            memory = _memory_of(tensor, found)
            saved = _Saved(tensor, memory)
            if memory is not None:
                memory.views.append(weakref.ref(saved))
            return saved

        with saved_tensors_hooks(pack, _unpack):
            yield

    def start(self, key: Hashable) -> None:
        """OFFLOAD."""
        memories, flats = list[_Memory](), list[Tensor]()
        for reference in self._taken.pop(key).values():
            memory = reference()
            flat = memory.leave() if memory is not None else None
            if memory is not None and flat is not None:
                memories.append(memory)
                flats.append(flat)
        if not flats:
            self._away[key] = _Away([], [], None)
            return
        if self._lanes is None:
            self._device = flats[0].device
            self._lanes = _Lane(self._device), _Lane(self._device)
        blocks = self._take_blocks(sum(_aligned(flat.numel()) for flat in flats))
        to, source, place = list[Tensor](), list[Tensor](), 0
        for memory, flat in zip(memories, flats, strict=True):
            memory.parts = _parts(blocks, place, flat.numel())
            to += memory.parts
            source += _cut(flat, memory.parts)
            place += _aligned(flat.numel())
        reads = {id(block.read): block.read for block in blocks if block.read is not None}
        written = self._lanes[0].copy(to, source, list(reads.values()))
        self._leaving.append(_Leaving(flats, self._begun, written))
        self._away[key] = _Away([weakref.ref(memory) for memory in memories], blocks, written)

    def compute_begins(self) -> None:
        self._let_go()
        self._begun += 1

    def fetch(self, key: Hashable) -> None:
        """RELOAD."""
        self._let_go()
        memories, blocks, written = self._away.pop(key)
        to, source = list[Tensor](), list[Tensor]()
        for memory in filter(None, (reference() for reference in memories)):
            memory.flat = torch.empty(memory.num_bytes, dtype=torch.uint8, device=self._device)
            to += _cut(memory.flat, memory.parts)
            source += memory.parts
            memory.parts = []
        read = None
        if to:
            assert self._lanes is not None
            read = self._arriving[key] = self._lanes[1].copy(to, source, [written])
        self._free += [_Block(block.room, read) for block in blocks]

    def wait(self, key: Hashable) -> None:
        """What `fetch` has started is needed now."""
        if key in self._arriving:
            assert self._lanes is not None
            self._lanes[1].hold_up(self._arriving.pop(key))

    def discard(self) -> None:
        """Forget everything (a step that failed)."""
        for lane in self._lanes or ():
            lane.hold_up_for_all()  # before memory is let go of that copies may still be reading
        self._free += [_Block(block.room) for away in self._away.values() for block in away.blocks]
        for held in (self._taken, self._leaving, self._away, self._arriving):
            held.clear()

    @property
    def is_idle(self) -> bool:
        return not (self._taken or self._leaving or self._away or self._arriving)

    def _let_go(self) -> None:
        """Of what was copied while a compute action ran."""
        while self._leaving and self._leaving[0].action < self._begun:
            assert self._lanes is not None
            self._lanes[0].hold_up(self._leaving[0].written)
            del self._leaving[0]

    def _take_blocks(self, num_bytes: int) -> list[_Block]:
        number = -(-num_bytes // BLOCK)
        taken, self._free = self._free[:number], self._free[number:]
        return taken + [_Block(host_memory((BLOCK,), torch.uint8, self._device)) for _ in range(number - len(taken))]


def _memory_of(tensor: Tensor, found: dict[int, weakref.ref[_Memory]]) -> _Memory | None:
    """The memory of a tensor that may leave."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
        return None
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes < SMALLEST:
        return None
    address = storage._cdata  # not that of its bytes: gathered weights are freed, and others get theirs
    memory = found[address]() if address in found else None
    if memory is None:
        memory = _Memory(num_bytes)
        found[address] = weakref.ref(memory)
    return memory


def _unpack(saved: _Saved) -> Tensor:
    if saved.is_edited:
        assert saved.tensor is not None
        raise RuntimeError(
            _EDITED.format(
                kind=saved.tensor.type(), shape=list(saved.tensor.shape), now=saved.tensor._version, then=saved.version
            )
        )
    if saved.tensor is not None:
        return saved.tensor
    assert saved.memory is not None
    assert saved.memory.flat is not None, "activations in host memory were needed before their RELOAD"
    dtype, *look = saved.look
    return torch.empty(0, dtype=dtype, device=saved.memory.flat.device).set_(saved.memory.flat.untyped_storage(), *look)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _parts(blocks: Sequence[_Block], place: int, num_bytes: int) -> list[Tensor]:
    """The parts of `blocks`, taken as one, for as many bytes from `place` on."""
    found = []
    while num_bytes:
        block, start = divmod(place, BLOCK)
        length = min(BLOCK - start, num_bytes)
        found.append(blocks[block].room[start : start + length])
        place, num_bytes = place + length, num_bytes - length
    return found


def _cut(flat: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """`flat` in pieces as long as the parts."""
    return [flat] if len(parts) == 1 else list(flat.split([part.numel() for part in parts]))
