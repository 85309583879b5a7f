"""Point-to-point messages between pipeline ranks: nested structures of tensors, asynchronous, without pickle.

[Note: headers]
A receiver has to allocate before it can receive. The first message of every `key` on a directed edge is preceded by a header
(structure, shapes, dtypes, requires_grad); both sides keep it, and later messages of the key are bare tensors: no header, no
synchronisation with the host. The key is the caller's promise that messages are alike. The sender checks
the promise before anything leaves, because a receiver with buffers of the wrong size cannot be saved: gloo aborts the
process, NCCL hangs.

[Note: order]
Messages carry no tags, which NCCL does not have: on every directed edge (source, destination) they are received in the order in which
they are sent, and the caller posts both in the same order. A receive whose header is still to come cannot be posted,
nor can those behind it; they queue up and are posted when the first of them is waited for.

[Note: who waits for sends]
The communicator owns sends in flight: it keeps the data alive until the backend has read it. Finished sends are dropped as later
ones are posted; `flush` waits for the rest, at the end of a step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .payload import Header, TensorMeta, put_together, take_apart

MAX_HEADERS = 4096  # per directed edge; the least recently used is forgotten, by both sides at the same message


class _Headers:
    """Headers known on one directed edge. Sender and receiver see the same keys in the same order, so they agree."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Hashable, Header] = OrderedDict()

    def get(self, key: Hashable) -> Header | None:
        header = self._by_key.get(key)
        if header is not None:
            self._by_key.move_to_end(key)
        return header

    def put(self, key: Hashable, header: Header) -> None:
        self._by_key[key] = header
        if len(self._by_key) > MAX_HEADERS:
            self._by_key.popitem(last=False)


class Sent:
    """A message on its way: its operations, the tensors they read, and whether its receiver may be late posting it.

    The communicator owns it and waits for it in the end. Who learns in another way that the message has arrived, such as by the
    answer to it, calls `wait` to let go of the data at once.
    """

    __slots__ = ("_tensors", "_works", "may_be_late")

    def __init__(self, works: list[dist.Work], tensors: list[Tensor], may_be_late: bool) -> None:
        self._works = works
        self._tensors = tensors
        self.may_be_late = may_be_late

    @property
    def pending(self) -> bool:
        """Whether nobody has waited for it yet."""
        return bool(self._tensors)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []


class Receive:
    """A message to come. Its owner calls `wait` once, where the data is needed."""

    __slots__ = ("_buffers", "_comm", "_works", "header", "key", "source")

    def __init__(self, comm: PipeComm, source: int, key: Hashable, header: Header | None) -> None:
        self._comm = comm
        self.source = source
        self.key = key
        self.header = header
        self._buffers: list[Tensor] | None = None
        self._works: list[dist.Work] = []

    def complete(self) -> None:
        """Wait until the data is here, and leave it where it is. On CUDA only the current stream waits."""
        if self._buffers is None:
            self._comm._post_until(self)
        for work in self._works:
            work.wait()
        self._works = []

    def wait_tensors(self) -> list[Tensor]:
        """The tensors of the message, none of which requires grad yet."""
        self.complete()
        assert self._buffers is not None
        buffers, self._buffers = self._buffers, []
        return buffers

    def wait(self) -> Any:
        """The payload; tensors that require grad on the sending side do so here, as leaves."""
        tensors = self.wait_tensors()
        assert self.header is not None
        for tensor, meta in zip(tensors, self.header.tensors, strict=True):
            if meta.requires_grad:
                tensor.requires_grad_()
        return put_together(self.header, tensors)


class PipeComm:
    """Messages between the ranks of `group`; ranks are counted within the group.

    device  where received tensors are put; by default the current accelerator, or the CPU for gloo
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device if device is not None else _device_of(group)
        # Gloo reports a send as complete only once it has been waited for, so there the number in flight is bounded instead.
        self._completion_is_known = "nccl" in dist.get_backend(group)
        self._max_in_flight = 2 * self.size
        self._sent_headers: dict[int, _Headers] = {}
        self._known_headers: dict[int, _Headers] = {}
        self._in_flight: dict[int, deque[Sent]] = {}
        self._unposted: dict[int, deque[Receive]] = {}

    def isend(self, payload: Any, destination: int, key: Hashable) -> Sent:
        """Send `payload` to rank `destination`, which calls `irecv` with the same key.

        ValueError, before anything is sent, if `payload` is not like the earlier ones of this key.
        """
        header, tensors = take_apart(payload)
        return self.isend_message(header, tensors, destination, key)

    def isend_message(self, header: Header, tensors: Sequence[Tensor], destination: int, key: Hashable) -> Sent:
        """`isend` for a payload that has been taken apart already."""
        headers = self._sent_headers.get(destination)
        if headers is None:
            headers = self._sent_headers[destination] = _Headers()
        known = headers.get(key)
        wire = [self._wire(tensor) for tensor in tensors]
        if known is None:
            headers.put(key, header)
            return self._send(self._encode(header, key) + wire, destination, may_be_late=True)
        if known != header:
            raise ValueError(
                f"the message {key!r} from pipeline rank {self.rank} to {destination} is not like the earlier ones of this key, so the "
                f"receiver's buffers would not fit it.\n  now:     {header}\n  earlier: {known}\n"
                "Microbatches of different shapes need different keys; after freezing or unfreezing parameters, or changing what stages "
                "send, call forget_headers() on all ranks."
            )
        return self._send(wire, destination, may_be_late=False)

    def irecv(self, source: int, key: Hashable) -> Receive:
        """Receive the next message from rank `source`, which sends it with the same key."""
        receive = Receive(self, source, key, None)
        queue = self._unposted.get(source)
        if queue is None:
            queue = self._unposted[source] = deque()
            self._known_headers[source] = _Headers()
        if not queue:
            receive.header = self._known_headers[source].get(key)
        if receive.header is None:
            queue.append(receive)
        else:
            self._post(receive)
        return receive

    def isend_tensors(self, tensors: Sequence[Tensor], destination: int) -> Sent:
        """Send bare tensors, whose shapes and dtypes the receiver knows."""
        return self._send([self._wire(tensor) for tensor in tensors], destination, may_be_late=False)

    def irecv_tensors(self, metas: Sequence[TensorMeta], source: int) -> Receive:
        """Receive bare tensors; take them with `wait_tensors`."""
        receive = Receive(self, source, None, Header(("list", (("tensor",),) * len(metas)), tuple(metas)))
        queue = self._unposted.get(source)
        if queue:
            queue.append(receive)
        else:
            self._post(receive)
        return receive

    def flush(self) -> None:
        """Wait for everything that has been sent. On CUDA only the current stream waits."""
        for sent in self._in_flight.values():
            while sent:
                sent.popleft().wait()

    def discard(self) -> None:
        """Drop what is in flight after a failed step, without waiting. The communicator cannot be used afterwards."""
        self._in_flight.clear()
        self._unposted.clear()

    def forget_headers(self) -> None:
        """Exchange headers anew. All ranks of the group must call it between the same messages."""
        self._sent_headers.clear()
        self._known_headers = {source: _Headers() for source in self._unposted}

    # Posting ---------------------------------------------------------------------------------------------------------

    def _send(self, tensors: list[Tensor], destination: int, may_be_late: bool) -> Sent:
        in_flight = self._in_flight.get(destination)
        if in_flight is None:
            in_flight = self._in_flight[destination] = deque()
        self._drop_finished(in_flight)
        works = [dist.isend(tensor, group=self.group, group_dst=destination) for tensor in tensors if tensor.numel() > 0]
        sent = Sent([work for work in works if work is not None], tensors, may_be_late)
        in_flight.append(sent)
        return sent

    def _drop_finished(self, in_flight: deque[Sent]) -> None:
        while in_flight and (in_flight[0].is_completed() if self._completion_is_known else not in_flight[0].pending):
            in_flight.popleft()
        if not self._completion_is_known:
            # A receiver that awaits a header posts late, possibly after something that this rank has yet to send.
            while len(in_flight) >= self._max_in_flight and not in_flight[0].may_be_late:
                in_flight.popleft().wait()

    def _post(self, receive: Receive) -> None:
        assert receive.header is not None
        buffers = [torch.empty(meta.shape, dtype=meta.dtype, device=self.device) for meta in receive.header.tensors]
        works = [dist.irecv(self._wire(buffer), group=self.group, group_src=receive.source) for buffer in buffers if buffer.numel() > 0]
        receive._buffers = buffers
        receive._works = [work for work in works if work is not None]

    def _post_until(self, receive: Receive) -> None:
        """Post what is queued from this source, up to `receive`, waiting for headers on the way."""
        queue, headers = self._unposted[receive.source], self._known_headers[receive.source]
        while receive._buffers is None:
            first = queue.popleft()
            if first.header is None:
                first.header = headers.get(first.key)
            if first.header is None:
                first.header = self._receive_header(first)
                headers.put(first.key, first.header)
            self._post(first)

    # Headers ---------------------------------------------------------------------------------------------------------

    def _encode(self, header: Header, key: Hashable) -> list[Tensor]:
        """[length of the header and of the key's text, both as bytes]"""
        head, name = header.to_bytes(), repr(key).encode()
        lengths = torch.tensor([len(head), len(name)], dtype=torch.int64, device=self.device)
        return [lengths, torch.frombuffer(bytearray(head + name), dtype=torch.uint8).to(self.device)]

    def _receive_header(self, receive: Receive) -> Header:
        lengths = torch.empty(2, dtype=torch.int64, device=self.device)
        dist.recv(lengths, group=self.group, group_src=receive.source)
        head, name = lengths.tolist()
        data = torch.empty(head + name, dtype=torch.uint8, device=self.device)
        dist.recv(data, group=self.group, group_src=receive.source)
        raw = bytes(data.tolist())
        if raw[head:] != repr(receive.key).encode():
            raise RuntimeError(
                f"pipeline rank {self.rank} expects the message {receive.key!r} from rank {receive.source}, which sends "
                f"{raw[head:].decode()}: the ranks do not run the same schedule, or have different microbatch shapes"
            )
        return Header.from_bytes(raw[:head])

    @staticmethod
    def _wire(tensor: Tensor) -> Tensor:
        """What the backend sees: contiguous, outside of autograd, 8-bit floats as bytes."""
        tensor = tensor.detach().contiguous()
        return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1 else tensor


def _device_of(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
