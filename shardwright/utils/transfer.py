"""Batches on their way to the device.

[Note: batches on their way]
A step asks the device for nothing that the host knows, so that the host is a step ahead of it, and a batch can travel
while the one before it is computed: on a stream of its own, from memory that the device reads by itself (pinned). A
batch that only the step sees is sent off as soon as the loader has it (`Transfers`), and `to_device` finds the copies
that have been made. A batch that a script sees is sent when a model is called with it, since scripts may change it
until then; they may again when the call returns, so what lies in pinned memory of theirs is waited for, by the host:
for its copy, not for what the device computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from . import pytree
from .streams import is_pinned, lies_on_host, pinned_copy, streams_of


class _Copy(NamedTuple):
    """arrived  event of the stream that copies; None where a copy is there when it is launched.
    version  how often the source had been changed in place; None where nobody counts
    """

    source: torch.Tensor  # keeps its id from being another's
    tensor: torch.Tensor
    arrived: Any
    version: int | None = None

    @property
    def holds(self) -> bool:
        return self.version is None or self.version == self.source._version


_copies: dict[int, _Copy] = {}  # of the batch that the next step takes, by the id of the host's tensor
_lane: tuple[Any, torch.device, Any] | None = None  # what has streams, a device, and the stream of copies to it
_pretended: Callable[[torch.Tensor], torch.Tensor] | None = None


@contextmanager
def pretended(moved: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside, the CPU stands for a device: `moved` makes its copy of a tensor of the host."""
    global _pretended
    before, _pretended = _pretended, moved
    try:
        yield
    finally:
        _pretended = before


def needs_transfer(device: torch.device) -> bool:
    """Whether batches in host memory must be moved to `device`."""
    return device.type != "cpu" or _pretended is not None or streams_of(device) is not None


def is_on_host(batch: Any) -> bool:
    """Whether all tensors in it are, so that looking at them waits for no device."""
    return all(lies_on_host(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, launched and not waited for; itself where it is there."""
    copy = _copies.pop(id(tensor), None)
    if copy is None or copy.tensor.device != device or not copy.holds:
        copy = _sent(tensor, device)
    if copy.arrived is not None:
        streams = streams_of(device)
        stream = streams.current_stream(device)
        stream.wait_event(copy.arrived)
        copy.tensor.record_stream(stream)  # its memory is the other stream's
        if is_pinned(tensor):
            copy.arrived.synchronize()
    return copy.tensor


def _sent(tensor: torch.Tensor, device: torch.device) -> _Copy:
    """A copy that has been launched; the tensor itself where it need not move."""
    if _pretended is not None:
        return _Copy(tensor, _pretended(tensor), None)
    streams = streams_of(device)
    if streams is None or tensor.requires_grad or not _can_travel(tensor):
        return _Copy(tensor, tensor.to(device, non_blocking=True), None)
    lane = _lane_to(device, streams)
    with streams.stream(lane):
        room = torch.empty_like(tensor, device=device)
        # a copy that has to be made is nobody else's
        room.copy_(tensor if is_pinned(tensor) else pinned_copy(tensor, device), non_blocking=True)
        return _Copy(tensor, room, lane.record_event())


def _lane_to(device: torch.device, streams: Any) -> Any:
    global _lane
    if _lane is None or _lane[0] is not streams or _lane[1] != device:
        _lane = streams, device, streams.Stream(device)
    return _lane[2]


class Parcel:
    """Copies of one batch on their way. `hand_over`: `to_device` finds them from now on, in place of those of the
    parcel before, which no step has asked for.
    """

    def __init__(self, copies: dict[int, _Copy]) -> None:
        self._content = copies

    def hand_over(self) -> None:
        _copies.clear()
        _copies.update(self._content)


class Transfers:
    """Sends off the batches of one loader; see [Note: batches on their way]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, batch: Any) -> Parcel:
        """Nobody may write to `batch` until the parcel is handed over and a step has asked for it."""
        sources = {id(leaf): leaf for leaf in pytree.tree_leaves(batch) if _can_travel(leaf)}
        return Parcel({key: self._sent(source) for key, source in sources.items()})

    def _sent(self, source: torch.Tensor) -> _Copy:
        version = None if source.is_inference() else source._version
        return _sent(source, self._device)._replace(version=version)


def transfers_to(device: torch.device) -> Transfers | None:
    """None where batches stay in host memory."""
    return Transfers(device) if needs_transfer(device) else None


def _can_travel(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and lies_on_host(leaf) and leaf.layout == torch.strided
