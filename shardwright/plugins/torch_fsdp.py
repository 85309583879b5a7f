"""Fully sharded data parallelism: torch's FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..cluster import ParallelMesh, job
from ..comm.quantised_wire import check_quantisable
from ..interface import ModelWrapper, OptimizerWrapper
from ..models.blocks import separable_blocks
from ..optim.kind import begin_state, has_stepped
from ..utils.argument_types import check_arguments
from ..utils.checkpointing import checkpoint_blocks
from ..utils.device import get_current_device, host_device
from ..utils.errors import divisors
from ..utils.labels import labelled
from ..zero.sharded_reads import refuse_hooks, show_assignments, stepping_on_dtensors, through_gathered_weights
from .base import (
    Plugin,
    require_precision,
    require_process_group,
)
from .fsdp_gradients import drop_unsharded
from .fsdp_wire import require_custom_communication, send_in_8_bits
from .without_effect import warn_once

_LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TorchFSDPModel(ModelWrapper):
    """Holds the sharded module, whose parameters are DTensors."""

    module: FSDPModule  # type: ignore[assignment]
    syncs = True  # whether backward reduces gradients

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._sharded = [param for param in module.parameters() if isinstance(param, DTensor)]
        show_assignments(self._sharded, True)

    def zero_grad(self, set_to_none: bool = True) -> None:
        drop_unsharded(self.unwrap())
        super().zero_grad(set_to_none)

    @job.heeds_failures
    @labelled("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.plain_parameters(), job.forward(waits=True):
            return super().forward(*args, **kwargs)

    @contextmanager
    def plain_parameters(self) -> Iterator[None]:
        """Inside, the model or the step runs; outside, `param.data = tensor` reaches the shards."""
        show_assignments(self._sharded, False)
        try:
            yield
        finally:
            show_assignments(self._sharded, True)


class TorchFSDPOptimizer(OptimizerWrapper):
    """Steps on sharded parameters as torch knows them."""

    model: TorchFSDPModel | None = None  # a copy of the optimizer has none

    def backward(
        self, loss: torch.Tensor, inputs: Sequence[torch.Tensor] | None = None, retain_graph: bool = False
    ) -> None:
        with through_gathered_weights():
            super().backward(loss, inputs, retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.model is not None:
            drop_unsharded(self.model.unwrap())
        super().zero_grad(set_to_none)

    def _step_wrapped(self) -> Any:
        with nullcontext() if self.model is None else self.model.plain_parameters(), stepping_on_dtensors(self.optim):
            return super()._step_wrapped()


class TorchFSDPPlugin(Plugin):
    """Parameters, gradients and optimizer state are sharded over the ranks; each block is gathered while it computes.

    mixed_precision     None computes in the model's own dtype; "bf16" or "fp16" computes in it and keeps parameters and
                        the gradient reduction in the model's dtype (usually fp32). Also a torch MixedPrecisionPolicy,
                        or any object with param_dtype and reduce_dtype. "fp16" has no loss scaler here:
                        Booster(mixed_precision="fp16") brings one.
    reshard_after_forward  free the gathered parameters after forward (ZeRO-3) or keep them for backward (ZeRO-2)
    shard_size          shard inside groups of this many ranks and replicate across them (HSDP); None shards over all
                        ranks
    cpu_offload         keep parameters, gradients and optimizer state in host memory
    activation_checkpointing  recompute each block in backward instead of keeping its activations
    auto_wrap_policy    the modules to gather one at a time: a function of the model returning modules, or a list of
                        class names; None finds the model's repeated blocks
    fp8_communication   gathered parameters and reduced gradients travel in 8 bits (docs/fp8_communication.md)
    param_init_fn       called with each module that has meta-device parameters after their storage was allocated
    """

    argument_advice: ClassVar[Mapping[str, str]] = {
        "process_group": "leave it out: all ranks share; shard_size limits the groups that shard",
        "sharding_strategy": "use reshard_after_forward=True (ZeRO-3) or False (ZeRO-2), and shard_size for hybrid "
        "sharding",
        "backward_prefetch": "leave it out: FSDP2 prefetches by itself",
        "ignored_modules": "leave it out: freeze what is not to be trained before boost",
        "sync_module_states": "leave it out: build or load the model alike on all ranks, or give param_init_fn",
    }

    def __init__(
        self,
        mixed_precision: str | MixedPrecisionPolicy | Any | None = None,
        reshard_after_forward: bool = True,
        shard_size: int | None = None,
        cpu_offload: bool | OffloadPolicy | Any = False,
        activation_checkpointing: bool = False,
        auto_wrap_policy: Callable[[nn.Module], Iterable[nn.Module]] | list[str] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        fp8_communication: bool = False,
    ) -> None:
        check_arguments(TorchFSDPPlugin.__init__, locals())
        require_process_group("TorchFSDPPlugin")
        if fp8_communication:
            require_custom_communication()
        world = dist.get_world_size()
        if shard_size is not None and (shard_size < 1 or world % shard_size):
            raise ValueError(
                f"shard_size={shard_size} does not divide world_size={world}; values that do: "
                f"{', '.join(map(str, divisors(world)))}"
            )
        self.policy = _precision_policy(mixed_precision)
        self.reshard_after_forward = reshard_after_forward
        self.shard_size = shard_size
        self.offload = _offload_policy(cpu_offload)
        self.activation_checkpointing = activation_checkpointing
        self.auto_wrap_policy = auto_wrap_policy
        self.param_init_fn = param_init_fn
        self.fp8_communication = fp8_communication

    moves_parameters = True

    def supported_precisions(self) -> list[str]:
        return ["fp32", "fp16", "bf16"]

    @property
    def can_unfreeze(self) -> bool:
        return True

    @property
    def split(self) -> str:
        return "TorchFSDPPlugin"

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> list[nn.Module]:
        """The blocks to gather one at a time."""
        super().check(model, optimizer)
        if self.fp8_communication:
            check_quantisable(model)
        blocks = self._blocks(model)
        if any(param.is_meta for param in model.parameters()) and self.param_init_fn is None:
            raise ValueError(
                "the model has parameters on the meta device: pass param_init_fn=... to fill them, or build the model "
                "with weights"
            )
        _check_unstepped(optimizer)
        refuse_hooks(model)
        return blocks

    def lay_out(
        self, model: nn.Module, optimizer: Optimizer | None, blocks: list[nn.Module]
    ) -> tuple[nn.Module, OptimizerWrapper | None]:
        _share_weights(model)
        if self.activation_checkpointing:
            if not blocks:
                raise ValueError(
                    f"activation_checkpointing=True: {type(model).__name__} has no repeated blocks to recompute; name "
                    "them with auto_wrap_policy=, or leave activation_checkpointing False"
                )
            checkpoint_blocks(blocks)
        old_names = {id(param): name for name, param in model.named_parameters()}
        self._shard(model, blocks)
        if optimizer is not None:
            _move_optimizer(optimizer, model, old_names)
        wrapped = TorchFSDPModel(model)
        if optimizer is not None and not isinstance(optimizer, OptimizerWrapper):
            optimizer = TorchFSDPOptimizer(optimizer)
            optimizer.model = wrapped
        return wrapped, optimizer

    def _blocks(self, model: nn.Module) -> list[nn.Module]:
        if self.auto_wrap_policy is None:
            return separable_blocks(model)
        if callable(self.auto_wrap_policy):
            return list(self.auto_wrap_policy(model))
        wanted = set(self.auto_wrap_policy)
        blocks = [module for module in model.modules() if type(module).__name__ in wanted]
        missing = wanted - {type(block).__name__ for block in blocks}
        if missing:
            present = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(
                f"auto_wrap_policy={sorted(missing)}: the model has no module of these classes; it has "
                f"{', '.join(present)}"
            )
        return blocks

    def _shard(self, model: nn.Module, blocks: list[nn.Module]) -> None:
        mesh = self._mesh()
        settings: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.policy,
            "offload_policy": self.offload,
        }
        on_meta = any(param.is_meta for param in model.parameters())
        if not on_meta and self.param_init_fn is not None and dist.get_rank() == 0:
            warn_once(
                f"without effect: param_init_fn ({type(model).__name__} has its weights, and it fills those on "
                "the meta device)"
            )
        for block in blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        if self.fp8_communication and mesh.size(-1) > 1:
            send_in_8_bits(model)
        job.note_lasting("TorchFSDPPlugin, which is torch's FSDP2")
        device = torch.device("cpu") if isinstance(self.offload, CPUOffloadPolicy) else get_current_device()
        if on_meta:
            assert self.param_init_fn is not None
            empty = [module for module in model.modules() if any(p.is_meta for p in module.parameters(recurse=False))]
            model.to_empty(device=device)
            for module in empty:
                self.param_init_fn(module)
        elif device.type != "cpu":
            model.to(device)

    def _mesh(self) -> DeviceMesh:
        mesh = ParallelMesh(zero_group_size=self.shard_size)
        return mesh.device_mesh("shard") if mesh.size("replica") == 1 else mesh.device_mesh("replica", "shard")

    @contextmanager
    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper | None = None) -> Iterator[None]:
        """Keeps unsharded gradients on every rank until the first backward outside: memory for communication."""
        module = model.module if isinstance(model, ModelWrapper) else model
        assert isinstance(module, FSDPModule)
        before = model.syncs if isinstance(model, TorchFSDPModel) else True
        _set_syncs(model, module, False)
        try:
            yield
        finally:
            _set_syncs(model, module, before)


def _set_syncs(model: nn.Module, module: FSDPModule, value: bool) -> None:
    module.set_requires_gradient_sync(value)
    if isinstance(model, TorchFSDPModel):
        model.syncs = value


def _precision_policy(mixed_precision: str | MixedPrecisionPolicy | Any | None) -> MixedPrecisionPolicy:
    if mixed_precision is None:
        return MixedPrecisionPolicy()
    if isinstance(mixed_precision, MixedPrecisionPolicy):
        return mixed_precision
    if isinstance(mixed_precision, str):
        require_precision(mixed_precision, ["fp32", *_LOW_PRECISION], "mixed_precision")
        return (
            MixedPrecisionPolicy()
            if mixed_precision == "fp32"
            else MixedPrecisionPolicy(param_dtype=_LOW_PRECISION[mixed_precision])
        )
    if hasattr(mixed_precision, "param_dtype") and hasattr(mixed_precision, "reduce_dtype"):
        return MixedPrecisionPolicy(param_dtype=mixed_precision.param_dtype, reduce_dtype=mixed_precision.reduce_dtype)
    raise ValueError(
        f"mixed_precision={mixed_precision!r} must be None, 'bf16', 'fp16', 'fp32' or an object with param_dtype and "
        "reduce_dtype"
    )


def _offload_policy(cpu_offload: bool | OffloadPolicy | Any) -> OffloadPolicy:
    if isinstance(cpu_offload, OffloadPolicy):
        return cpu_offload
    # FSDP1's CPUOffload carries the flag in this attribute
    wanted = getattr(cpu_offload, "offload_params", cpu_offload)
    if not isinstance(wanted, bool | None):
        raise ValueError(f"cpu_offload={cpu_offload!r} must be True, False or a torch OffloadPolicy")
    # Pinned memory only helps copies to an accelerator, and pinning fails without one.
    return CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if wanted else OffloadPolicy()


def _check_unstepped(optimizer: Optimizer | None) -> None:
    if optimizer is not None and has_stepped(optimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has already taken steps; FSDP replaces its parameters by shards: "
            "boost before the first step, or load its state afterwards with booster.load_optimizer"
        )


@torch.no_grad()
def _share_weights(model: nn.Module) -> None:
    """Rank 0's weights and buffers on all ranks: fully_shard lets each keep its part of its own, and parts of
    different models are none.
    """
    if dist.get_world_size() == 1:
        return
    device = host_device()
    for tensor in [*model.parameters(), *model.buffers()]:
        if not tensor.is_meta:
            shared = tensor.detach().to(device, copy=True).contiguous()
            dist.broadcast(shared, src=0)
            tensor.copy_(shared)


def _move_optimizer(optimizer: Optimizer, model: nn.Module, old_names: dict[int, str]) -> None:
    """Point the optimizer's groups at the sharded parameters that replaced the ones it was built on."""
    new = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [new[old_names[id(param)]] for param in group["params"]]
    begin_state(optimizer)
