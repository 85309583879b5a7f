"""What every plugin promises the booster."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from ..checkpoint.position import Position
from ..cluster.mesh import ParallelMesh
from ..interface import ModelWrapper, OptimizerWrapper
from ..optim.kind import check_closures
from ..spec import EXPERT_AXES
from ..utils.arguments import ExplainedArguments
from ..utils.errors import one_of
from ..utils.overlap import overlapping
from ..utils.tensors import whole_tensor
from .agreement import agree_on_boost
from .data.dataloader import build_dataloader
from .data.own_loader import check_dataloader, shard_dataloader


class Boosted(NamedTuple):
    """What `boost` returns; None stays None."""

    model: nn.Module
    optimizer: OptimizerWrapper | None
    criterion: Callable[..., Any] | None
    dataloader: DataLoader | None
    lr_scheduler: Any


class Plugin(ABC, metaclass=ExplainedArguments):
    """Lays a model, its optimizer and its data out over the processes.

    argument_advice  what to say about arguments that other frameworks' plugins of this name take
    """

    argument_advice: ClassVar[Mapping[str, str]] = {}
    moves_parameters = False  # whether each gets memory of its own
    mesh: ParallelMesh | None = None  # of a plugin that has several axes

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Wrap what is given: what each rank can refuse alone, then what only all of them can, then the work."""
        checked = self.check(model, optimizer)
        agree_on_boost(self, model, optimizer, dataloader, lr_scheduler)
        laid_out, wrapped = self.lay_out(model, optimizer, checked)
        return Boosted(laid_out, wrapped, criterion, dataloader, lr_scheduler)

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> Any:
        """ValueError, without any communication, for what cannot be boosted; returns what `lay_out` goes on with."""
        require_trainable(model, optimizer, moves=self.moves_parameters)

    def lay_out(
        self, model: nn.Module, optimizer: Optimizer | None, checked: Any
    ) -> tuple[nn.Module, OptimizerWrapper | None]:
        """Model and optimizer wrapped; all ranks have agreed that theirs are the same. A plugin brings this, or its own
        `configure`.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither lay_out nor configure")

    @abstractmethod
    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None) -> AbstractContextManager[None]:
        """Accumulate gradients locally inside the context; the first backward after it reduces the sum."""

    @abstractmethod
    def supported_precisions(self) -> list[str]: ...

    def supported_devices(self) -> list[str]:
        return ["cuda", "cpu"]

    def control_precision(self) -> bool:
        """Whether the plugin sets the number format itself, so that `Booster(mixed_precision=...)` would fight it."""
        return False

    def control_device(self) -> bool:
        """Whether the plugin moves the model to its device itself."""
        return True

    def support_no_sync(self) -> bool:
        return True

    @property
    def can_unfreeze(self) -> bool:
        """Whether a parameter that was frozen when it was boosted may require gradients later."""
        return False

    @property
    def steps_itself(self) -> bool:
        """Whether gradients and weights are only right in the step of the optimizer that boost returned."""
        return False

    @property
    def split(self) -> str:
        """How weights are split over ranks, in the words of the plugin's settings; "" where every rank holds all of
        them.
        """
        return ""

    @property
    def is_pipelined(self) -> bool:
        """Whether ranks hold different layers, so that only `execute_pipeline` can run the model."""
        return False

    def support_skipped_steps(self) -> bool:
        """Whether a step can be left out: gradients that were not stepped on must go with `zero_grad`."""
        return True

    def support_lora(self) -> bool:
        return True

    def adapter_state(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Whole adapter parameters of the model that boost returned, by full name. A collective over all ranks."""
        return {name: whole_tensor(param.detach()).cpu() for name, param in unwrapped(model).named_parameters()}

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(number of data-parallel ranks, this rank's position among them)."""
        return dist.get_world_size(), dist.get_rank()

    def position(self, model: nn.Module | None = None) -> Position:
        """Where this rank stands for checkpoints of `model`, which boost returned."""
        return Position.data_parallel(dist.get_rank(), dist.get_world_size())

    def prepare_dataloader(
        self,
        dataset: Dataset,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type[Sampler] | None = None,
        **kwargs: Any,
    ) -> DataLoader:
        """A loader of this rank's share of `dataset`; see `shardwright.plugins.data.dataloader.build_dataloader`."""
        num_replicas, rank = self.data_parallel
        return build_dataloader(
            dataset,
            batch_size,
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            distributed_sampler_cls=distributed_sampler_cls,
            **kwargs,
        )

    def shard_dataloader(self, dataloader: Any) -> Any:
        """A DataLoader that was written for one process, dealt out to data-parallel ranks: what `boost` does with
        the one it is given.
        """
        return None if dataloader is None else shard_dataloader(dataloader, *self.data_parallel)

    def check_dataloader(self, dataloader: Any) -> None:
        """ValueError, without any communication, where `shard_dataloader` could not deal it out."""
        if dataloader is not None:
            check_dataloader(dataloader, *self.data_parallel)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: OptimizerWrapper | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        name = type(self).__name__
        raise ValueError(
            f"execute_pipeline with {name}: this plugin has no pipeline. Use HybridParallelPlugin(tp_size=..., "
            "pp_size=...), whose execute_pipeline works for every pp_size including 1, or write the step out: loss = "
            "criterion(model(**batch), batch); booster.backward(loss, optimizer); optimizer.step()"
        )


def mesh_position(mesh: ParallelMesh, copies: frozenset[str] = frozenset()) -> Position:
    axes = ("dp_sp", "dp", "pp", "tp", "sp") + ((*EXPERT_AXES, "expert_dp") if mesh.size("ep") > 1 else ())
    coordinates, sizes = {axis: mesh.coordinate(axis) for axis in axes}, {axis: mesh.size(axis) for axis in axes}
    return Position(mesh.rank, mesh.world_size, coordinates, sizes, copies)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module, inside of the wrapper that boost put around it."""
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def require_process_group(plugin: str) -> None:
    if not dist.is_initialized():
        raise ValueError(
            f"{plugin} needs a process group: call shardwright.launch_from_torch() first (it works under "
            "plain python too)"
        )


def require_trainable(model: nn.Module, optimizer: Optimizer | None, *, moves: bool) -> None:
    """What every plugin asks of model and optimizer. `moves`: parameters get memory of their own."""
    require_parameters(model)
    require_own_parameters(model, optimizer)
    if moves:
        require_separate_parameters(model, optimizer)


def require_parameters(model: nn.Module) -> None:
    if not any(True for _ in model.parameters()):
        raise ValueError(f"model={type(model).__name__} has no parameters: there is nothing to train or to synchronise")


def require_own_parameters(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse an optimizer over tensors that are not parameters of `model`: it would step something nobody computes
    gradients for.
    """
    if optimizer is None:
        return
    check_closures(optimizer)
    own = {id(param) for param in model.parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not params:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has no parameters: build it on model.parameters() "
            "before booster.boost"
        )
    foreign = sum(id(param) not in own for param in params)
    if foreign:
        raise ValueError(
            f"optimizer={type(optimizer).__name__} holds {foreign} of {len(params)} parameters that are not in "
            f"model={type(model).__name__}: build the optimizer on this model's parameters before "
            "booster.boost (and after anything that replaces them, such as LoRA)"
        )


def require_separate_parameters(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Refuse a parameter that is trained and shares memory with another one: it is about to get memory of its own."""
    if optimizer is None:
        return
    trained = {param for group in optimizer.param_groups for param in group["params"] if param.requires_grad}
    named = dict(model.named_parameters())
    for one, other in overlapping(named.items()):
        if named[one] in trained or named[other] in trained:
            alike = named[one].data_ptr() == named[other].data_ptr() and named[one].shape == named[other].shape
            tie = (
                (f"tie them as one parameter before the optimizer is built (model.{other} = model.{one}), or ")
                if alike
                else ""
            )
            raise ValueError(
                f"parameters {one} and {other} are two parameters in the same memory, which would train apart here: "
                f"{tie}give one memory of its own (model.{other}.data = model.{other}.data.clone())"
            )


def require_precision(precision: str, supported: list[str], field: str = "precision") -> None:
    if precision not in supported:
        raise one_of(field, precision, supported)
