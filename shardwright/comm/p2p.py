"""Point-to-point messages between pipeline ranks: nested structures of tensors, asynchronous, without pickle.

[Note: headers]
A receiver has to allocate before it can receive. The first message of every `key` on a directed edge is preceded by a header
(structure, shapes, dtypes, requires_grad); both sides keep it, and later messages of the key are bare tensors: no header, no
synchronisation with the host. The key is the caller's promise that messages are alike. The sender checks
the promise before anything leaves, because a receiver with buffers of the wrong size cannot be saved: gloo aborts the
process, NCCL hangs.

[Note: order]
Messages carry no tags, which NCCL does not have: on every directed edge (source, destination) they are received in the order in which
they are sent. NCCL may even run all transfers between two ranks, or all of a rank, one after the other. So the caller's
order must be safe where every transfer blocks, which `pipeline.lowering` guarantees; then waiting for a header where
the receive is posted, and for old sends before new ones, is safe too.

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
    """A message on its way: its operations and the tensors they read.

    The communicator owns it and waits for it in the end. Who learns in another way that the message has arrived, such as by the
    answer to it, calls `wait` to let go of the data at once.
    """

    __slots__ = ("_tensors", "_works")

    def __init__(self, works: list[dist.Work], tensors: list[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    @property
    def pending(self) -> bool:
        """Whether nobody has waited for it yet."""
        return bool(self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._tensors = [], []


class Receive:
    """A message to come. Its owner takes it once, where the data is needed, by `wait` or `wait_tensors`."""

    __slots__ = ("_buffers", "_works", "header")

    def __init__(self, header: Header, buffers: list[Tensor], works: list[dist.Work]) -> None:
        self.header = header
        self._buffers = buffers
        self._works = works

    def complete(self) -> None:
        """Wait until the data is here, and leave it where it is. On CUDA only the current stream waits."""
        for work in self._works:
            work.wait()
        self._works = []

    def wait_tensors(self) -> list[Tensor]:
        """The tensors of the message, none of which requires grad yet."""
        self.complete()
        buffers, self._buffers = self._buffers, []
        return buffers

    def wait(self) -> Any:
        """The payload; tensors that require grad on the sending side do so here, as leaves."""
        tensors = self.wait_tensors()
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
            return self._send(self._encode(header, key) + wire, destination)
        if known != header:
            raise ValueError(
                f"the message {key!r} from pipeline rank {self.rank} to {destination} is not like the earlier ones of this key, so the "
                f"receiver's buffers would not fit it.\n  now:     {header}\n  earlier: {known}\n"
                "Microbatches of different shapes need different keys; after freezing or unfreezing parameters, or changing what stages "
                "send, call forget_headers() on all ranks."
            )
        return self._send(wire, destination)

    def irecv(self, source: int, key: Hashable) -> Receive:
        """Receive the next message from rank `source`, which sends it with the same key. Only the first of a key blocks."""
        headers = self._known_headers.get(source)
        if headers is None:
            headers = self._known_headers[source] = _Headers()
        header = headers.get(key)
        if header is None:
            header = self._receive_header(source, key)
            headers.put(key, header)
        return self._post(header, source)

    def isend_tensors(self, tensors: Sequence[Tensor], destination: int) -> Sent:
        """Send bare tensors, whose shapes and dtypes the receiver knows."""
        return self._send([self._wire(tensor) for tensor in tensors], destination)

    def irecv_tensors(self, metas: Sequence[TensorMeta], source: int) -> Receive:
        """Receive bare tensors; take them with `wait_tensors`."""
        return self._post(Header(("list", (("tensor",),) * len(metas)), tuple(metas)), source)

    def flush(self) -> None:
        """Wait for everything that has been sent. On CUDA only the current stream waits."""
        for sent in self._in_flight.values():
            while sent:
                sent.popleft().wait()

    def discard(self) -> None:
        """Drop what is in flight after a failed step, without waiting. The communicator cannot be used afterwards."""
        self._in_flight.clear()

    def forget_headers(self) -> None:
        """Exchange headers anew. All ranks of the group must call it between the same messages."""
        self._sent_headers.clear()
        self._known_headers.clear()

    # Posting ---------------------------------------------------------------------------------------------------------

    def _send(self, tensors: list[Tensor], destination: int) -> Sent:
        in_flight = self._in_flight.get(destination)
        if in_flight is None:
            in_flight = self._in_flight[destination] = deque()
        while in_flight and (in_flight[0].is_completed() if self._completion_is_known else not in_flight[0].pending):
            in_flight.popleft()
        while not self._completion_is_known and len(in_flight) >= self._max_in_flight:
            in_flight.popleft().wait()
        works = [dist.isend(tensor, group=self.group, group_dst=destination) for tensor in tensors if tensor.numel() > 0]
        sent = Sent([work for work in works if work is not None], tensors)
        in_flight.append(sent)
        return sent

    def _post(self, header: Header, source: int) -> Receive:
        buffers = [torch.empty(meta.shape, dtype=meta.dtype, device=self.device) for meta in header.tensors]
        works = [dist.irecv(self._wire(buffer), group=self.group, group_src=source) for buffer in buffers if buffer.numel() > 0]
        return Receive(header, buffers, [work for work in works if work is not None])

    # Headers ---------------------------------------------------------------------------------------------------------

    def _encode(self, header: Header, key: Hashable) -> list[Tensor]:
        """[length of the header and of the key's text, both as bytes]"""
        head, name = header.to_bytes(), repr(key).encode()
        lengths = torch.tensor([len(head), len(name)], dtype=torch.int64, device=self.device)
        return [lengths, torch.frombuffer(bytearray(head + name), dtype=torch.uint8).to(self.device)]

    def _receive_header(self, source: int, key: Hashable) -> Header:
        lengths = torch.empty(2, dtype=torch.int64, device=self.device)
        dist.recv(lengths, group=self.group, group_src=source)
        head, name = lengths.tolist()
        data = torch.empty(head + name, dtype=torch.uint8, device=self.device)
        dist.recv(data, group=self.group, group_src=source)
        raw = bytes(data.tolist())
        if raw[head:] != repr(key).encode():
            raise RuntimeError(
                f"pipeline rank {self.rank} expects the message {key!r} from rank {source}, which sends {raw[head:].decode()}: "
                "the ranks do not run the same schedule, or do not agree on the shapes of microbatches"
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
