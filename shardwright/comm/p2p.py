"""Point-to-point messages between pipeline ranks: nested structures of tensors, asynchronous, without pickle.

[Note: headers]
A receiver has to allocate before it can receive. The first message of every `key` on a directed edge is preceded by a
header (structure, shapes, dtypes, requires_grad); both sides keep it, and later messages of the key are bare tensors:
no header, no synchronisation with the host. The key is the caller's promise that messages are alike. The sender checks
the promise before anything leaves, because a receiver with buffers of the wrong size cannot be saved: gloo aborts the
process, NCCL hangs.

A key that is new, of a kind that is not (`MessageKey`), needs no header where both sides know a rule for its shapes.
Both find it in the same message, from the same headers and by the same function (`PipeComm.learn`); the sender checks
what it has against the rule, too.

[Note: order]
Messages carry no tags, which NCCL does not have: on every directed edge (source, destination) they are received in the
order in which they are sent. NCCL runs all transfers of a communicator one after the other. So the caller's
order must be safe where every transfer blocks, which `pipeline.planning.lowering` guarantees; then waiting for a header
where the receive is posted, and for old sends before new ones, is safe too.

[Note: communicators]
Each directed edge has a process group of its two ranks (see [Note: channels] in `pipeline.planning.placement`). On NCCL
all its operations are posted as batches, also single ones: the tensors of a message are one launch and one `Work`, and
torch takes the group's own communicator for batches, while for single operations it may make one more for each pair of
ranks, which carries both directions (torch 2.13, by reading: none of this has run on GPUs). Communicators, and the
connections in them, are made when they are first used, which blocks the host until the other rank comes: `warm_up` does
that before the first step. gloo connects when a group is made, and posts tensors one by one.

[Note: who waits for sends]
The communicator owns sends in flight: it keeps the data alive until the backend has read it. NCCL tells which sends are
through, and these let go of their tensors when something is posted next. gloo tells only whoever waits (`is_completed`
is false until then), so there a send is kept until it is known to have been received, with all before it on its edge,
by the answer to it (`has_arrived`), and the number in flight is bounded. `flush` waits for the rest, at the end of a
step.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..cluster import job
from ..utils.device import device_type_of_backend, get_current_device
from ..utils.labels import labelled
from ..utils.streams import has_streams
from .in_flight import Receive, Sent
from .payload import Header, TensorMeta, take_apart
from .quantised import can_be_quantised, quantise, wire_bytes
from .quantised_wire import is_quantised
from .shape_rules import MessageKey, ShapeRule, Sizes

MAX_HEADERS = 4096  # per directed edge; the least recently used is forgotten, by both sides at the same message
MAX_KINDS = 256
LEAST_QUANTISED = 256  # elements of a message that is quantised
_LONGEST_HEADER = 2**26  # bytes
MAX_LESSONS = 4  # dry runs for one kind of message, each from another header

Learn = Callable[[MessageKey, Header], ShapeRule | None]


class _Kind:
    """What is known of one kind of message: a rule, and the latest header that was exchanged because the rule did
    not tell.
    """

    def __init__(self) -> None:
        self.rule: ShapeRule | None = None
        self.exchanged: tuple[MessageKey, Header] | None = None  # nobody has learnt from it yet
        self.lessons = 0

    def header(self, sizes: Sizes, learn: Learn) -> Header | None:
        header = self.rule.header(sizes) if self.rule is not None else None
        if header is None and self.exchanged is not None and self.lessons < MAX_LESSONS:
            self.lessons += 1
            rule, self.exchanged = learn(*self.exchanged), None
            if rule is not None:
                self.rule, header = rule, rule.header(sizes)
        return header


class _Edge:
    """Headers known on one directed edge. Sender and receiver see the same keys in the same order, so they agree."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Header] = OrderedDict()
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()

    def find(self, key: Hashable, learn: Learn | None) -> Header | None:
        """The header of a key that was seen before, or that follows from others."""
        header = self._by_key.get(key)
        if header is not None:
            self._by_key.move_to_end(key)
        elif learn is not None and isinstance(key, MessageKey):
            header = self._kind(key).header(key.sizes, learn)
            if header is not None:
                self._put(key, header)
        return header

    def exchanged(self, key: Hashable, header: Header) -> None:
        """Keep what one side has told the other."""
        self._put(key, header)
        if isinstance(key, MessageKey):
            self._kind(key).exchanged = (key, header)

    def _put(self, key: Hashable, header: Header) -> None:
        self._by_key[key] = header
        if len(self._by_key) > MAX_HEADERS:
            self._by_key.popitem(last=False)

    def _kind(self, key: MessageKey) -> _Kind:
        kind = self._kinds.setdefault(key.kind, _Kind())
        self._kinds.move_to_end(key.kind)
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return kind


class _Line(NamedTuple):
    """Where messages from or to one rank go: a group, and that rank's place in it."""

    group: dist.ProcessGroup
    peer: int


class PipeComm:
    """Messages between the ranks of `group`; ranks are counted within the group.

    group   one that quantises (`comm.quantised_wire`) makes messages do so, wherever they travel
    groups  by (source, destination) the group of the two in which messages travel; None: all messages travel in `group`
    device  where received tensors are put; by default the current accelerator, or the CPU for gloo

    learn   finds the rule for a kind of message from a header and its key, the same on all ranks; None: every new key
            has a header
    caches  False: every message has a header
    book    headers by key, where there are no other ranks: what this one sends is entered, and what it receives is
            looked up
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        groups: Mapping[tuple[int, int], dist.ProcessGroup] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device if device is not None else _device_of(group)
        self.learn: Learn | None = None
        self.caches = True
        self.book: MutableMapping[Hashable, Header] | None = None
        self._groups = groups
        self._quantises = is_quantised(group)
        self._on_streams = has_streams(self.device)
        self._max_in_flight = 2 * self.size
        self._sent_headers: dict[int, _Edge] = {}
        self._known_headers: dict[int, _Edge] = {}
        self._lines: dict[tuple[int, int], _Line] = {}
        self._in_flight: dict[int, deque[Sent]] = {}
        self._abandoned: list[Sent | Receive] = []

    def warm_up(self) -> None:
        """Let all channels connect, by an empty message each. Collective over the ranks of the pipeline."""
        for source, destination in self._groups or ():
            token = torch.zeros(1, device=self.device)
            if self.rank == source:
                self.isend_tensors([token], destination).wait()
            else:
                self.irecv_tensors([TensorMeta((1,), token.dtype, False)], source).complete()

    def isend(self, payload: Any, destination: int, key: Hashable) -> Sent:
        """Send `payload` to rank `destination`, which calls `irecv` with the same key.

        ValueError, before anything is sent, if `payload` is not like the earlier ones of this key.
        """
        header, tensors = take_apart(payload)
        return self.isend_message(header, tensors, destination, key)

    def isend_message(self, header: Header, tensors: Sequence[Tensor], destination: int, key: Hashable) -> Sent:
        """`isend` for a payload that has been taken apart already."""
        edge = self._sent_headers.get(destination)
        if edge is None:
            edge = self._sent_headers[destination] = _Edge()
        known = edge.find(key, self.learn) if self.caches else None
        wire = [
            self._wire(tensor, self._packs(meta, meta.requires_grad))
            for tensor, meta in zip(tensors, header.tensors, strict=True)
        ]
        if known is None:
            edge.exchanged(key, header)
            if self.book is not None:
                self.book[key] = header
            return self._send(wire, destination, self._encode(header, key))
        if known != header:
            raise ValueError(
                f"the message {key!r} from pipeline rank {self.rank} to {destination} is not what the receiver expects "
                "after the "
                f"earlier ones, so its buffers would not fit it.\n  now:      {header}\n  expected: {known}\n"
                "What a stage sends must follow from the shapes of the microbatch. Where it does not (a layer that "
                "drops or pads tokens by "
                "what they are), or parameters are frozen and unfrozen between steps, give the plugin "
                "enable_metadata_cache=False: every "
                "message then tells what it is"
            )
        return self._send(wire, destination)

    def irecv(self, source: int, key: Hashable) -> Receive:
        """Receive the next message from rank `source`, which sends it with the same key. Only one that has a header
        blocks.
        """
        edge = self._known_headers.get(source)
        if edge is None:
            edge = self._known_headers[source] = _Edge()
        header = edge.find(key, self.learn) if self.caches else None
        if header is None:
            header = self._receive_header(source, key)
            edge.exchanged(key, header)
        return self._expect(header, source, [self._packs(meta, meta.requires_grad) for meta in header.tensors])

    def isend_tensors(self, tensors: Sequence[Tensor], destination: int) -> Sent:
        """Send bare tensors, whose shapes and dtypes the receiver knows."""
        metas = [TensorMeta(tuple(tensor.shape), tensor.dtype, False) for tensor in tensors]
        wire = [self._wire(tensor, self._packs(meta)) for tensor, meta in zip(tensors, metas, strict=True)]
        return self._send(wire, destination)

    def irecv_tensors(self, metas: Sequence[TensorMeta], source: int) -> Receive:
        """Receive bare tensors; take them with `wait_tensors`."""
        header = Header(("list", (("tensor",),) * len(metas)), tuple(metas))
        return self._expect(header, source, [self._packs(meta) for meta in metas])

    def has_arrived(self, sent: Sent, destination: int) -> None:
        """The answer to `sent` is here, so it and all that was sent before it has been received."""
        in_flight = self._in_flight[destination]
        if sent.pending:
            while (earlier := in_flight.popleft()) is not sent:
                earlier.wait()
            sent.wait()

    def flush(self) -> None:
        """Wait for everything that has been sent. On CUDA only the current stream waits."""
        for sent in self._in_flight.values():
            while sent:
                sent.popleft().wait()

    def discard(self, receives: Iterable[Receive] = ()) -> None:
        """Give up what is in flight, and `receives`, after a failed step and without waiting. The communicator cannot
        be used afterwards.

        Until its connections are closed the backend may still read and write the tensors, so they live until then.
        """
        self._abandoned += [message for sent in self._in_flight.values() for message in sent]
        self._abandoned += [receive for receive in receives if receive.pending]
        self._in_flight.clear()
        job.when_closed(self._abandoned.clear)

    def forget_headers(self) -> None:
        """Exchange headers anew. All ranks of the group must call it between the same messages."""
        self._sent_headers.clear()
        self._known_headers.clear()

    # Posting ---------------------------------------------------------------------------------------------------------

    @labelled(lambda _, tensors, destination, *described: f"send to pipeline rank {destination}")
    def _send(self, tensors: Sequence[Tensor], destination: int, described: Sequence[Tensor] = ()) -> Sent:
        """Start sending `tensors`, behind a header that is received part by part."""
        in_flight = self._in_flight.get(destination)
        if in_flight is None:
            in_flight = self._in_flight[destination] = deque()
        if self._on_streams:
            self._let_go()
        else:
            while in_flight and not in_flight[0].pending:
                in_flight.popleft()
            while len(in_flight) >= self._max_in_flight:
                in_flight.popleft().wait()
        group, peer = self._lines.get((self.rank, destination)) or self._line(self.rank, destination)
        works = [work for part in described for work in self._start_sending([part], group, peer)]
        works += self._start_sending(tensors, group, peer)
        sent = Sent(works, [*described, *tensors])
        in_flight.append(sent)
        return sent

    def _start_sending(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, peer: int) -> list[dist.Work]:
        if self._on_streams:
            return self._post_batch(dist.isend, tensors, group, peer)
        return [dist.isend(tensor, group=group, group_dst=peer) for tensor in tensors if tensor.numel() > 0]  # type: ignore[misc]

    @labelled(lambda _, header, source, packed: f"receive from pipeline rank {source}")
    def _expect(self, header: Header, source: int, packed: Sequence[bool]) -> Receive:
        buffers = [
            torch.empty(wire_bytes(math.prod(meta.shape)), dtype=torch.uint8, device=self.device)
            if packs
            else torch.empty(meta.shape, dtype=meta.dtype, device=self.device)
            for meta, packs in zip(header.tensors, packed, strict=True)
        ]
        wire = [self._wire(buffer) for buffer in buffers]
        group, peer = self._lines.get((source, self.rank)) or self._line(source, self.rank)
        if self._on_streams:
            self._let_go()
            works = self._post_batch(dist.irecv, wire, group, peer)
        else:
            works = [dist.irecv(tensor, group=group, group_src=peer) for tensor in wire if tensor.numel() > 0]  # type: ignore[misc]
        return Receive(header, buffers, works, packed)

    @staticmethod
    def _post_batch(
        operation: Callable[..., Any], tensors: Sequence[Tensor], group: dist.ProcessGroup, peer: int
    ) -> list[dist.Work]:
        batch = [
            dist.P2POp(operation, tensor, group=group, group_peer=peer) for tensor in tensors if tensor.numel() > 0
        ]
        return dist.batch_isend_irecv(batch) if batch else []

    def _let_go(self) -> None:
        """Drop sends that are through."""
        for in_flight in self._in_flight.values():
            while in_flight and in_flight[0].is_completed():
                in_flight.popleft().wait()

    def _line(self, source: int, destination: int) -> _Line:
        other = destination if source == self.rank else source
        if self._groups is None:
            line = _Line(self.group, other)
        else:
            # groups have their ranks in ascending order
            line = _Line(self._groups[source, destination], int(other > self.rank))
        self._lines[source, destination] = line
        return line

    # Headers ---------------------------------------------------------------------------------------------------------

    def _encode(self, header: Header, key: Hashable) -> tuple[Tensor, Tensor]:
        """[length of the header and of the key's text], [both as bytes]"""
        head, name = header.to_bytes(), repr(key).encode()
        lengths = torch.tensor([len(head), len(name)], dtype=torch.int64, device=self.device)
        return lengths, torch.frombuffer(bytearray(head + name), dtype=torch.uint8).to(self.device)

    @labelled("wait for the description of a message")
    def _receive_header(self, source: int, key: Hashable) -> Header:
        if self.book is not None:
            return self.book[key]
        (lengths,) = self.irecv_tensors([TensorMeta((2,), torch.int64, False)], source).wait_tensors()
        head, name = lengths.tolist()
        if not (0 <= head <= _LONGEST_HEADER and 0 <= name <= _LONGEST_HEADER):
            raise ValueError(
                f"a message between stages has a header of {head} bytes and a key of {name}, which is none"
            )
        (data,) = self.irecv_tensors([TensorMeta((head + name,), torch.uint8, False)], source).wait_tensors()
        raw = bytes(data.tolist())
        if raw[head:] != repr(key).encode():
            raise RuntimeError(
                f"pipeline rank {self.rank} expects the message {key!r} from rank {source}, which sends "
                f"{raw[head:].decode(errors='replace')}: the ranks do not run the same schedule, or do not agree on "
                "the shapes of microbatches"
            )
        return Header.from_bytes(raw[:head])

    def _packs(self, meta: TensorMeta, differentiable: bool = True) -> bool:
        """Whether a tensor travels quantised: activations and gradients, in a group that does.

        Masks, tables and positions need no gradient, and rounding a handful of numbers (a part of the loss) saves
        nothing.
        """
        large = differentiable and self._quantises and math.prod(meta.shape) >= LEAST_QUANTISED
        return large and can_be_quantised(meta.dtype)

    @staticmethod
    def _wire(tensor: Tensor, packs: bool = False) -> Tensor:
        """What the backend sees: contiguous, outside of autograd, 8-bit floats as bytes."""
        tensor = tensor.detach().contiguous()
        if packs:
            return quantise(tensor.view(-1))
        return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else tensor


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if device_type_of_backend(dist.get_backend(group)) == "cuda":
        return get_current_device()
    return torch.device("cpu")
