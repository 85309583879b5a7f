"""The device of this process behind one set of names, so that a script runs unchanged on GPUs and on the CPU."""

from __future__ import annotations

from functools import cache

import torch

from .utils.device import accelerator_type, get_current_device
from .utils.random import set_seed


class Accelerator:
    """Forwards to `torch.cuda` where a CUDA device is present and answers for the CPU where none is."""

    @property
    def name(self) -> str:
        """ "cuda" or "cpu"."""
        return accelerator_type()

    def is_available(self) -> bool:
        """Whether there is anything faster than the CPU."""
        return self.name == "cuda"

    def get_current_device(self) -> torch.device:
        return get_current_device()

    def current_device(self) -> int:
        """Index of the current device among those of its kind."""
        return torch.cuda.current_device() if self.is_available() else 0

    def device_count(self) -> int:
        return torch.cuda.device_count() if self.is_available() else 1

    def set_device(self, device: torch.device | int | None = None) -> None:
        """Make `device` current."""
        if self.is_available():
            torch.cuda.set_device(get_current_device() if device is None else device)

    def synchronize(self, device: torch.device | int | None = None) -> None:
        """Wait for everything that was launched; on the CPU nothing runs behind the caller's back."""
        if self.is_available():
            torch.cuda.synchronize(device)

    def empty_cache(self) -> None:
        if self.is_available():
            torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        set_seed(seed)

    def max_memory_allocated(self, device: torch.device | int | None = None) -> int:
        """Peak bytes of tensors on the device. On the CPU, where torch does not count, the peak resident size of the
        process.
        """
        if self.is_available():
            return torch.cuda.max_memory_allocated(device)
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak

    def reset_peak_memory_stats(self, device: torch.device | int | None = None) -> None:
        """Restart the count of `max_memory_allocated`; the operating system's count on the CPU cannot be restarted."""
        if self.is_available():
            torch.cuda.reset_peak_memory_stats(device)


@cache
def get_accelerator() -> Accelerator:
    return Accelerator()
