"""How much an optimizer keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..plugins.hybrid.found_layout import without_states

_ADAM = 2.0  # numbers that the usual optimizers keep per element


def states_per_element(optimizer: Optimizer) -> float:
    """Numbers per element of its parameters, as a step of it on a small tensor of each group shows."""
    kept = elements = 0.0
    for group in optimizer.param_groups:
        size = sum(param.numel() for param in group["params"])
        dims = max(param.dim() for param in group["params"])
        try:
            kept += size * _tried(optimizer, group, dims)
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError):  # it needs more than that
            kept += size * _ADAM
        elements += size
    return kept / elements if elements else _ADAM


def _tried(optimizer: Optimizer, group: dict[str, Any], dims: int) -> float:
    small = nn.Parameter(torch.ones([64, 64, 2, 2, 2][:dims]))
    small.grad = torch.ones_like(small)
    trial = without_states(optimizer)
    trial.param_groups = [{**group, "params": [small]}]
    trial.step()
    kept = [value for value in trial.state[small].values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(value.numel() for value in kept) / small.numel()
