"""One face for every optimizer: which parts of which parameters it steps on, and taking them back.

Optimizers of this package answer themselves. A plain torch optimizer steps on the model's own parameters (on their
local rows, where FSDP2 has sharded them); `PlainParts` answers for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..interface import OptimizerWrapper
from ..interface.shards import LoadedShard, ParamShard, ShardedOptimizer
from ..utils.errors import counted
from ..utils.tensors import local_tensor
from .held import Held, held_tensors
from .position import Position


def parts_of_optimizer(optimizer: Optimizer, model: nn.Module, position: Position) -> ShardedOptimizer:
    """`optimizer` is what boost returned, or a bare torch optimizer over the parameters of `model`."""
    if not isinstance(optimizer, OptimizerWrapper):
        return PlainParts(optimizer, model, position)
    return optimizer.sharded or PlainParts(optimizer.unwrap(), model, position)


class PlainParts:
    """The parts of an optimizer that steps on the parameters of `model` as they are."""

    def __init__(self, optimizer: Optimizer, model: nn.Module, position: Position) -> None:
        self._optimizer = optimizer
        self._held = held_tensors(model, position)
        params = dict(model.named_parameters(remove_duplicate=False))
        self._params = {held.name: params[held.aliases[0]] for held in self._held if held.aliases[0] in params}
        self._group = {
            id(param): number for number, group in enumerate(optimizer.param_groups) for param in group["params"]
        }
        if self._group.keys() - {id(param) for param in params.values()}:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} steps on tensors that are not the model's parameters, so its "
                "state has no names: where an engine keeps it (DeepSpeed with ZeRO or half precision), save and load "
                "with the engine's own checkpoints"
            )

    def trained(self) -> dict[str, int]:
        return {name: self._group[id(param)] for name, param in self._params.items() if id(param) in self._group}

    def _stepped(self) -> list[tuple[Held, nn.Parameter]]:
        trained = self.trained()
        return [(held, self._params[held.name]) for held in self._held if held.name in trained]

    def shards(self) -> list[ParamShard]:
        result = []
        for held, param in self._stepped():
            state: dict[str, Any] = self._optimizer.state.get(param, {})
            flat = {
                key: local_tensor(value).flatten() for key, value in state.items() if _is_elementwise(key, value, param)
            }
            extra = {key: self._extra(held.name, key, value) for key, value in state.items() if key not in flat}
            result.append(
                ParamShard(
                    name=held.name,
                    spec=held.spec,
                    local_shape=held.local_shape,
                    start=held.start,
                    stop=held.stop,
                    group=self._group[id(param)],
                    master=held.tensor.flatten(),
                    state=flat,
                    extra=extra,
                    is_writer=held.is_writer,
                )
            )
        return result

    def _extra(self, name: str, key: str, value: Any) -> torch.Tensor:
        if isinstance(value, DTensor) or not isinstance(value, torch.Tensor | int | float):
            raise ValueError(
                f"optimizer={type(self._optimizer).__name__} keeps {key} of {name} as a {type(value).__name__}, which "
                "checkpoints cannot hold; under FSDP use an optimizer that works element by element, such as AdamW"
            )
        return torch.as_tensor(value)

    @torch.no_grad()
    def load_shards(self, loaded: Mapping[str, LoadedShard]) -> None:
        self._optimizer.state.clear()
        for held, param in self._stepped():
            shard = loaded[held.name]
            if shard.master is not None:
                held.tensor.copy_(shard.master.view(held.tensor.shape))
            group = self._optimizer.param_groups[self._group[id(param)]]
            on_device = bool(group.get("fused") or group.get("capturable"))
            state: dict[str, Any] = {
                key: _like_param(value.view(held.tensor.shape), param) for key, value in shard.state.items()
            }
            for key, value in shard.extra.items():
                state[key] = value.detach().clone().to(param.device if on_device or value.ndim else torch.device("cpu"))
            if state:
                self._optimizer.state[param] = state

    def publish_masters(self) -> None:
        """Nothing to do: the parameters are their own masters."""

    refresh_masters = publish_masters


def _is_elementwise(key: str, value: Any, param: torch.Tensor) -> bool:
    """Step counts of a parameter without dimensions have its shape too."""
    return isinstance(value, torch.Tensor) and value.shape == param.shape and key != "step"


def _like_param(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """`local`, which nobody else uses, laid out as `param`."""
    local = local.detach().to(local_tensor(param).device)
    if isinstance(param, DTensor):
        return DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
    return local


# Choices of a kernel, which belong to the machine and not to the training run.
_KERNELS = ("params", "fused", "foreach", "capturable", "differentiable")


def hyperparameters(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key not in _KERNELS} for group in groups]


def _is_alike(here: Any, there: Any) -> bool:
    """Whether one can take the other's place: numbers and tensors of one element each other's, tuples those of as many;
    of the rest only the optimizer knows.
    """
    if isinstance(here, int | float):
        return isinstance(there, int | float) or (isinstance(there, torch.Tensor) and there.numel() == 1)
    if isinstance(here, tuple | list):
        same = isinstance(there, tuple | list) and len(here) == len(there)
        return same and all(map(_is_alike, here, there))
    return not isinstance(here, torch.Tensor) or isinstance(there, int | float | torch.Tensor)


def load_hyperparameters(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    if len(groups) != len(saved):
        raise ValueError(
            f"the checkpoint has {counted(len(saved), 'param group')}, the optimizer {len(groups)}: build it "
            "with the same groups"
        )
    for group, values in zip(groups, saved, strict=True):  # before any is written to
        for key, value in values.items():
            if not _is_alike(group.get(key), value):
                raise TypeError(f"{key} is {group[key]!r} here and {value!r} there")
    for group, values in zip(groups, saved, strict=True):
        for key, value in values.items():
            current = group.get(key)
            group[key] = (
                value.to(current.device)
                if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor)
                else value
            )
