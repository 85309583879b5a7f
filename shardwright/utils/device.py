"""Which device this process computes on, and getting there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from .torch_names import FakeTensor


def accelerator_type() -> str:
    """ "cuda" where a CUDA device is present, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


_planned: str | None = None  # type of the devices of a job that is planned


@contextmanager
def planning_for(device_type: str) -> Iterator[None]:
    """Inside, what goes by the type of a device (sizes of buckets and chunks, in whose memory sums are made) is chosen
    as for this one, whatever this process computes on: a job of GPUs is planned on a laptop.
    """
    global _planned
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type={device_type!r} must be 'cpu' or 'cuda'")
    before, _planned = _planned, device_type
    try:
        yield
    finally:
        _planned = before


def chosen_as_for(device: torch.device | str) -> str:
    """Type of the device that choices are made for: that of `device`, or of what is planned."""
    return _planned or (device if isinstance(device, str) else device.type)


def plans_gpus() -> bool:
    """Whether a job of GPUs is planned, of which this machine need not have one, or not of that kind."""
    return _planned == "cuda"


def get_current_device() -> torch.device:
    """The CUDA device set by `launch`, or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_type_of_backend(backend: str) -> str:
    """Device type that tensors of a process group's collectives live on."""
    if "staged" in backend or backend == "fake":  # which take tensors from anywhere
        return accelerator_type()
    return "cuda" if "nccl" in backend else "cpu"


def host_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where ranks exchange what their hosts know: the CPU wherever the group's backend takes its tensors."""
    backend = dist.get_backend(group)
    return get_current_device() if "nccl" in backend and "gloo" not in backend else torch.device("cpu")


def move_model(model: nn.Module, device: torch.device) -> None:
    """As `model.to(device)`, but for a plan's model, which is there: torch would make new parameters of those without
    memory, and leave behind what is noted on them.
    """
    if not any(isinstance(param, FakeTensor) for param in model.parameters()):
        model.to(device)


def move_buffers(model: nn.Module, device: torch.device | str) -> None:
    """As `model.to(device)`, for the buffers alone."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
