"""Batches on their way to the device.

[Note: batches on their way]
A step asks the device for nothing that the host knows, so that the host is a step ahead of it, and the next batch can
travel while this one is computed: on a stream of its own, from memory that the device reads by itself (pinned). A
batch that only the step sees is sent off as soon as the loader has it (`Transfers`), and `to_device` finds the copies
that have been made. A batch that a script sees is moved when a model is called with it, since scripts may change it
until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from . import pytree


class _Copy(NamedTuple):
    source: torch.Tensor  # keeps its id from being another's
    tensor: torch.Tensor
    arrived: torch.cuda.Event | None


_copies: dict[int, _Copy] = {}  # of the batch that the next step takes, by the id of the host's tensor
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
    return device.type != "cpu" or _pretended is not None


def is_on_host(batch: Any) -> bool:
    """Whether all tensors in it are, so that looking at them waits for no device."""
    return all(leaf.device.type == "cpu" for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, launched and not waited for; itself where it is there."""
    copy = _copies.pop(id(tensor), None)
    if copy is None or copy.tensor.device != device:
        return _sent(tensor, device)
    if copy.arrived is not None:
        stream = torch.cuda.current_stream(device)
        stream.wait_event(copy.arrived)
        copy.tensor.record_stream(stream)  # its memory is the other stream's
    return copy.tensor


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if _pretended is not None:
        return _pretended(tensor)
    source = _pinned(tensor) if tensor.device.type == "cpu" and device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


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
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batch: Any) -> Parcel:
        """Nobody may write to `batch` until the parcel is handed over and a step has asked for it."""
        sources = {id(leaf): leaf for leaf in pytree.tree_leaves(batch) if _can_travel(leaf)}
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            tensors = {key: _sent(source, self._device) for key, source in sources.items()}
            arrived = None if self._stream is None else self._stream.record_event()
        return Parcel({key: _Copy(source, tensors[key], arrived) for key, source in sources.items()})


def transfers_to(device: torch.device) -> Transfers | None:
    """None where batches stay in host memory."""
    return Transfers(device) if needs_transfer(device) else None


def _can_travel(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """In memory that can be read while the host goes on. A copy, where it has to be made, is nobody else's."""
    strided = tensor.layout == torch.strided and type(tensor) is torch.Tensor
    return tensor.pin_memory() if strided and not tensor.is_pinned() else tensor
