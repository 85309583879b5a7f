"""Steps of an optimizer on tensors that nobody trains, which show what it keeps."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_ADAM = 2.0  # numbers that the usual optimizers keep per element
_EIGHT_BIT = ("8bit", "int8")  # in names of optimizers whose kernels run on devices alone
_BLOCK = 256  # numbers of 8 bits that share a scale there
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def without_states(optimizer: Optimizer) -> Optimizer:
    """One like it that has not stepped, for the same parameters."""
    found = object.__new__(type(optimizer))
    found.__dict__.update(optimizer.__dict__)
    found.state = defaultdict(dict)
    return found


def tried(optimizer: Optimizer, group: dict[str, Any] | None = None, params: Sequence[nn.Parameter] = ()) -> Optimizer:
    """One like it for `params`, with the options of `group`; None: with copies of its own groups. Nobody is told of
    its steps: neither hooks nor a scheduler, which puts a `step` of its own on the instance.
    """
    found = without_states(optimizer)
    found.__dict__.pop("step", None)
    found.__dict__.update({name: OrderedDict() for name in _HOOKS})
    groups = optimizer.param_groups if group is None else [{**group, "params": list(params)}]
    found.param_groups = [dict(each) for each in groups]
    return found


def kept_bytes(states: Mapping[str, Any]) -> int:
    """Of a parameter, without single numbers."""
    return sum(value.nbytes for value in states.values() if isinstance(value, torch.Tensor) and value.dim())


def states_of_small(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """Numbers of four bytes that it keeps per element, by a step on a small parameter; where its step needs a device,
    by its name.
    """
    name = type(optimizer).__name__.lower()
    by_name = 1.0 if "lion" in name or "sgd" in name else _ADAM
    if any(word in name for word in _EIGHT_BIT):
        return by_name * (1 + 4 / _BLOCK) / 4
    dims = max((param.dim() for param in group["params"]), default=1)
    param = nn.Parameter(torch.ones([64, 64, 2, 2, 2][:dims]))
    param.grad = torch.ones_like(param)
    trial = tried(optimizer, group, [param])
    try:
        trial.step()
    except Exception:  # the optimizer's own code, on a parameter that it has never seen
        return by_name
    return kept_bytes(trial.state[param]) / (4 * param.numel())
