"""Streams and events: the one place where code asks for them.

    streams = streams_of(device)     None where the work of a call has ended when it returns
    stream = streams.Stream(device)  all as in torch.cuda: Stream, Event, stream, current_stream, synchronize

[Note: a model in their place] `shardwright.testing.stream_model` stands in for the streams of the CPU, where there are
none. Whatever asks here, and not for the type of a device, whether it has streams goes the way of a GPU then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .device import chosen_as_for

_model: Any = None  # of streams, which the CPU has while a test says so
_making = False  # host memory


def streams_of(device: torch.device) -> Any:
    """What stands for `torch.cuda` on this device; None where it has no streams."""
    if device.type == "cuda":
        return torch.cuda
    return _model if device.type == "cpu" else None


def has_streams(device: torch.device) -> bool:
    """Whether calls return before their work has ended, here or on the devices that are planned for."""
    return streams_of(device) is not None or chosen_as_for(device) == "cuda"


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room on the host that `device` copies to and from beside its other work: pinned, and with nothing in it yet."""
    global _making
    _making = True
    try:
        room = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    finally:
        _making = False
    if _model is not None:
        _model.is_on_host(room)
    return room


def makes_host_memory() -> bool:
    """Whether `host_memory` is asking torch for some: what counts a device's memory on a CPU tells it apart by that."""
    return _making


def pinned_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of what lies on the host, in memory that `device` reads beside its other work."""
    room = torch.empty_like(tensor, pin_memory=device.type == "cuda")
    if _model is not None:
        _model.is_on_host(room)
    return room.copy_(tensor)


def lies_on_host(tensor: torch.Tensor) -> bool:
    """Whether the host can look at it without a wait. In a model of streams the CPU's tensors are the device's, but
    for those that were said to be the host's.
    """
    return tensor.device.type == "cpu" and (_model is None or _model.holds_on_host(tensor))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a device reads it by itself, so that whoever writes to it must know that it has."""
    if _model is not None:
        return bool(_model.holds_on_host(tensor, pinned=True))
    return tensor.device.type == "cpu" and tensor.is_pinned()


@contextmanager
def modelled(model: Any) -> Iterator[None]:
    """Inside, the CPU has the streams of `model`. For tests."""
    global _model
    assert _model is None, "the CPU has the streams of one model at a time"
    _model = model
    try:
        yield
    finally:
        _model = None
