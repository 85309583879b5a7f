"""What a step keeps a GPU busy with: kernels and copies, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_NAMED = 110  # characters of a kernel's name: templates of C++ go on for pages
_MOST = 40


class Kernels(NamedTuple):
    """
    seconds  of all kernels and copies of a step, so that what a step takes longer is time in which the device waits
    table    name, how many of a step, and their milliseconds; the dearest first
    """

    seconds: float
    table: list[tuple[str, float, float]]


def kernels_of(step: Callable[[], object], steps: int = 2) -> Kernels:
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [
        (row.key[:_NAMED], row.count / steps, row.self_device_time_total / 1e3 / steps)
        for row in recorded.key_averages()
        if row.device_type == DeviceType.CUDA and not row.is_user_annotation
    ]
    found.sort(key=lambda row: -row[2])
    return Kernels(sum(row[2] for row in found) / 1e3, found[:_MOST])
