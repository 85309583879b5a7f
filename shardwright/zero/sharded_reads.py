"""Parameters and gradients of FSDP2 as a script sees them, where DTensor would give a wrong answer.

`param.data = tensor` replaces what DTensor shows of itself, and neither the shard that is trained nor the one that is
gathered: outside of forwards and steps parameters get a class that copies the values. (Inside, the class is DTensor,
which torch's kernels know.)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from ..comm.compat import TENSOR_DATA, has_gradient_hooks

HOOKS = (
    "param.register_hook, or any gradient hook from before boost, under TorchFSDPPlugin: gradients are made for "
    "gathered parameters, and it would never be called. After boost, param.register_post_accumulate_grad_hook(hook) "
    "sees this rank's shard of the reduced gradient; LowLevelZeroPlugin and TorchDDPPlugin call all hooks"
)


class AssignableParameter(DTensor):
    """What a sharded parameter is made for as long as a script may assign to its `.data`."""

    __slots__ = ()

    @property
    def data(self) -> torch.Tensor:
        values: torch.Tensor = TENSOR_DATA.__get__(self)
        return values

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"param.data = a tensor of shape {tuple(value.shape)}, {value.dtype} after boost: the parameter has "
                f"{tuple(self.shape)}, {self.dtype}, and is sharded over the ranks; assign one like that, or change "
                "the model before booster.boost"
            )
        with torch.no_grad():
            if not isinstance(value, DTensor):  # the whole parameter, which every rank has
                value = distribute_tensor(value, self.device_mesh, self.placements, src_data_rank=None)
            elif (value.device_mesh, value.placements) != (self.device_mesh, self.placements):
                raise ValueError(
                    f"param.data = a DTensor with placements {value.placements} after boost: the parameter has "
                    f"{self.placements}; assign value.full_tensor()"
                )
            self.to_local().copy_(value.to_local())

    def register_hook(self, hook: Any) -> NoReturn:
        raise ValueError(HOOKS)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        show_assignments([self], False)
        try:
            return copy.deepcopy(self, memo)
        finally:
            show_assignments([self], True)


def refuse_hooks(model: nn.Module) -> None:
    """FSDP2 replaces the parameters, and their hooks would never be called."""
    for name, param in model.named_parameters():
        if has_gradient_hooks(param):
            raise ValueError(f"{name}: {HOOKS}")


@contextmanager
def stepping_on_dtensors(optim: Optimizer) -> Iterator[None]:
    """Not every optimizer does with DTensors what it does with tensors; torch says so in words of its own."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("DTensor", "placement", "sharding strategy")):
            raise
        raise ValueError(
            f"optimizer={type(optim).__name__} cannot step on sharded parameters (DTensors: "
            f"{str(error).splitlines()[0]}). Use LowLevelZeroPlugin or HybridParallelPlugin, which give it whole "
            "parameters at all stages, or another optimizer; foreach=False and fused=False help some"
        ) from error


@contextmanager
def through_gathered_weights() -> Iterator[None]:
    """FSDP2 gathers weights for a backward that comes through the model's outputs; others find them freed."""
    try:
        yield
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise ValueError(
            "a backward that needs weights which FSDP2 has freed (a gradient penalty): compute the penalty first, then "
            "the model's outputs for the loss, and call backward once on the sum, or use LowLevelZeroPlugin"
        ) from error


def show_assignments(params: Iterable[torch.Tensor], wanted: bool) -> None:
    """Outside of forwards and steps, let `param.data = tensor` of sharded parameters reach their shards."""
    for param in params:
        param.__class__ = AssignableParameter if wanted else DTensor
