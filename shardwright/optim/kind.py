"""What a torch optimizer needs to see: single elements, or whole parameters.

An element-wise optimizer updates every element from that element's gradient and state alone, so it may step on any flat
piece of a parameter. Others look at a parameter as a matrix (Muon's orthogonalisation, Adafactor's row and column
means, LAMB's trust ratio) and must get it whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# Of other packages, by full name: nothing is imported to find out.
_ELEMENTWISE_ELSEWHERE = (
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "apex.optimizers.fused_adam.FusedAdam",
)
# Whose `step`, with fused=True, divides gradients by `grad_scale` and does nothing where `found_inf` is set.
_FUSED: tuple[type[Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
# Switched to it unasked. Not SGD: its fused kernel fails when one parameter has a momentum buffer and another none yet
# (torch 2.13).
_FUSABLE: tuple[type[Optimizer], ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def has_stepped(optim: Optimizer) -> bool:
    """Whether `optim` has taken steps or loaded a state. Adagrad's constructor makes the state that others make in
    their first step.
    """
    if not isinstance(optim, torch.optim.Adagrad):
        return bool(optim.state)
    return any(float(state.get("step", 1)) > 0 for state in optim.state.values())


def begin_state(optim: Optimizer) -> None:
    """Start the state over for the tensors that the groups hold now: nothing, or for Adagrad what its constructor
    makes.
    """
    optim.state.clear()
    if isinstance(optim, torch.optim.Adagrad):
        for group in optim.param_groups:
            for param in group["params"]:
                step = torch.zeros((), dtype=torch.float32, device=param.device if group.get("fused") else "cpu")
                optim.state[param] = {
                    "step": step,
                    "sum": torch.full_like(param, group.get("initial_accumulator_value", 0.0)),
                }


def is_elementwise(optim: Optimizer) -> bool:
    """Whether `optim` may step on flat pieces of parameters.

    An attribute `elementwise` (True or False) on the optimizer or its class decides. Without it, torch's own
    element-wise classes do (DeepSpeed's and apex's Adam too), by exact type or by a subclass that keeps their `step`;
    everything else gets whole parameters, which is right for any optimizer that treats each parameter by itself.
    """
    declared = getattr(optim, "elementwise", None)
    if declared is not None:
        return bool(declared)
    if f"{type(optim).__module__}.{type(optim).__qualname__}" in _ELEMENTWISE_ELSEWHERE:
        return True
    return keeps_step(optim, ELEMENTWISE)


def keeps_step(optim: Optimizer, classes: tuple[type[Optimizer], ...]) -> bool:
    """Whether `optim` steps as one of `classes` does: a subclass with a `step` of its own is another optimizer."""
    return any(isinstance(optim, cls) and _undecorated(type(optim).step) is _undecorated(cls.step) for cls in classes)


def _undecorated(step: Any) -> Any:
    """`step` without the profiling wrapper that `Optimizer.__init__` puts on the class that is instantiated first."""
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def check_closures(optim: Optimizer) -> None:
    """Refuse optimizers that run the model themselves."""
    if isinstance(optim, torch.optim.LBFGS):
        raise ValueError(
            "optimizer=LBFGS needs a closure and the whole model's gradient as one vector; use AdamW or another "
            "first-order one"
        )


def check_supported(optim: Optimizer) -> None:
    """Refuse optimizers that no sharding can serve."""
    check_closures(optim)
    if isinstance(optim, torch.optim.SparseAdam):
        raise ValueError(
            "optimizer=SparseAdam needs sparse gradients, but flat buffers are dense; use AdamW and "
            "Embedding(sparse=False)"
        )


def choose_fused(optim: Optimizer, device: torch.device) -> bool:
    """Switch groups that leave the kernel open to torch's fused one where it exists; returns whether all groups step
    with it.

    Only then does the step read `grad_scale` and `found_inf`: others may have a key "fused" in their groups and mean
    something else.
    """
    fusable = keeps_step(optim, _FUSABLE) and device.type in ("cpu", "cuda")
    if fusable and not (isinstance(optim, torch.optim.Adagrad) and device.type != "cpu"):
        for group in optim.param_groups:
            open_choice = group.get("fused") is None and group.get("foreach") is None
            if open_choice and not group.get("differentiable") and not group.get("capturable"):
                group["fused"] = True
    return keeps_step(optim, _FUSED) and all(bool(group.get("fused")) for group in optim.param_groups)
