"""The states of the global random generators: of the CPU, and of the accelerator where there is one."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

States = list[torch.Tensor]


@cache
def accelerator_module() -> Any:
    """The device module (`torch.cuda`, ...) whose default generator dropout uses, or None on a CPU-only machine."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None else torch.get_device_module(device)


def get_states() -> States:
    accelerator = accelerator_module()
    return [torch.get_rng_state()] + ([] if accelerator is None else [accelerator.get_rng_state()])


def set_states(states: States) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        accelerator_module().set_rng_state(states[1])
