"""Data parallelism with sharded optimizer states (ZeRO 1, 1.5, 2) or sharded everything (3), and mixed precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..checkpoint.position import Position
from ..cluster import job
from ..cluster.mesh import ParallelMesh, validate_sizes
from ..comm.quantised_wire import check_quantisable
from ..interface import ModelWrapper, OptimizerWrapper
from ..precision.fp8 import Fp8Options
from ..precision.policy import PrecisionPolicy
from ..precision.scaler import ScalerConfig
from ..utils.argument_types import check_arguments
from ..utils.device import get_current_device
from ..utils.labels import labelled
from ..zero.lay_out import lay_out
from ..zero.layout import BUCKET_SIZE_IN_M
from ..zero.settings import ZeroSettings
from .agreement import agree_on_arguments
from .base import mesh_position, require_precision, require_process_group
from .fp8 import check_fp8_model, convert_where_wanted, follow_history
from .settings import PRECISION_NAMES, PrecisionSettings
from .shared_buffers import share_all
from .without_effect import LOW_LEVEL_ZERO, Facts, find_without_effect, tell
from .zero_plugin import ZeroPlugin


class LowLevelZeroModel(ModelWrapper):
    """Runs the forward on inputs cast to the working dtype. `waits`: ranks wait for each other in it."""

    def __init__(
        self,
        module: nn.Module,
        policy: PrecisionPolicy,
        cast_inputs: bool,
        optimizer: OptimizerWrapper | None = None,
        waits: bool = False,
    ) -> None:
        super().__init__(module)
        self._waits = waits
        self._trained_by(optimizer)
        self._policy = policy
        self._cast_inputs = cast_inputs

    @job.heeds_failures
    @labelled("forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._cast_inputs:
            args, kwargs = self._policy.cast_inputs((args, kwargs))
        with self._running(), job.forward(self._waits):
            return self.module(*args, **kwargs)


class LowLevelZeroPlugin(ZeroPlugin):
    """Every rank sees different samples; optimizer states, gradients or parameters are sharded over the ranks.

    stage                    1 shards optimizer states, 2 also gradients, 3 also parameters
    precision                "fp32", "bf16" or "fp16": the dtype that parameters work in; masters stay in fp32. "fp8" is
                             "bf16" with use_fp8=True
    initial_scale ... max_scale  the fp16 loss scale, see `precision.scaler.ScalerConfig`
    max_norm                 clip the global gradient norm at every step, 0 for no clipping
    norm_type                2.0, the only norm that steps clip by (`optimizer.clip_grad_by_norm` knows others)
    reduce_bucket_size_in_m  elements per communication bucket in millions; on CUDA about 200 MB where nothing is said
    communication_dtype      dtype of gradients on the wire, None for the dtype they accumulate in (fp32)
    overlap_communication    reduce gradients while backward runs
    overlap_allgather        gather updated parameters while the next forward runs
    cpu_offload              masters and optimizer states in host memory
    master_weights           False steps half-precision parameters directly
    zero_group_size          ZeRO-1.5: shard inside groups of this many ranks; None or <= 0 over all ranks, 1 not at all
    extra_dp_size            the same from the other side: number of such groups; give one of the two
    gather_ahead             stage 3: how many layers are gathered before they are needed; None: as many as take the
                             memory of the largest part of the model
    cast_inputs              cast floating-point inputs of the model to the working dtype
    fp8_communication        gradients and updated weights travel in 8 bits (docs/fp8_communication.md)
    use_fp8, fp8_options     linears of the layers multiply in 8 bits, and how (docs/fp8.md)
    verbose                  print the layout of the buckets on rank 0

    Options that a combination has no use for are named in `without_effect` and once in the log.
    """

    argument_advice: ClassVar[Mapping[str, str]] = {
        "zero_stage": "it is called stage",
        "tp_size": "use HybridParallelPlugin(tp_size=..., zero_stage=...)",
        "pp_size": "use HybridParallelPlugin(pp_size=..., zero_stage=...)",
    }

    def __init__(
        self,
        stage: int = 1,
        precision: str = "bf16",
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = BUCKET_SIZE_IN_M,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        overlap_allgather: bool = False,
        cpu_offload: bool = False,
        master_weights: bool = True,
        verbose: bool = False,
        cast_inputs: bool = True,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        extra_dp_size: int = 1,
        *,
        zero_group_size: int | None = None,
        gather_ahead: int | None = None,
        fp8_options: Fp8Options | Mapping[str, Any] | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(LowLevelZeroPlugin.__init__, arguments)
        require_process_group("LowLevelZeroPlugin")
        require_precision(precision, list(PRECISION_NAMES))
        if stage not in (1, 2, 3):
            raise ValueError(f"stage={stage} must be 1 (optimizer states), 2 (and gradients) or 3 (and parameters)")
        if norm_type != 2.0:
            raise ValueError(
                f"norm_type={norm_type} must be 2.0: steps clip by the 2-norm; use "
                "optimizer.clip_grad_by_norm for others"
            )
        self.stage = stage
        self.precision = precision
        self.formats = PrecisionSettings(
            precision=precision, use_fp8=use_fp8, fp8_communication=fp8_communication, fp8_options=fp8_options
        )
        self.policy = PrecisionPolicy(self.formats.working)
        self.scaler = ScalerConfig(
            initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale
        )
        self.cast_inputs = cast_inputs
        self.verbose = verbose
        self.settings = ZeroSettings(
            stage=stage,
            max_norm=max_norm,
            bucket_size_in_m=reduce_bucket_size_in_m,
            communication_dtype=communication_dtype,
            overlap_communication=overlap_communication,
            overlap_allgather=overlap_allgather,
            cpu_offload=cpu_offload,
            master_weights=master_weights,
            gather_ahead=gather_ahead,
            quantises=fp8_communication,
            names={"bucket_size_in_m": "reduce_bucket_size_in_m"},
        )
        group_size = _group_size(zero_group_size, extra_dp_size)
        validate_sizes(dist.get_world_size(), pp=1, tp=1, sp=1, dp=None, zero_group_size=group_size)
        agree_on_arguments("LowLevelZeroPlugin", arguments)
        self.mesh = ParallelMesh(zero_group_size=group_size)
        facts = Facts(precision, stage, self.mesh.size("dp"), sharing=self.mesh.size("zero"))
        self.without_effect = find_without_effect(LowLevelZeroPlugin.__init__, arguments, LOW_LEVEL_ZERO, facts)
        tell(self.without_effect)

    def position(self, model: nn.Module | None = None) -> Position:
        return mesh_position(self.mesh)

    @property
    def split(self) -> str:
        return "stage=3" if self.stage == 3 else ""

    def check(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().check(model, optimizer)
        if self.settings.quantises and not self.policy.is_half:
            check_quantisable(model)
        check_fp8_model(self.formats, model)

    def lay_out(
        self, model: nn.Module, optimizer: Optimizer | None, checked: Any
    ) -> tuple[nn.Module, OptimizerWrapper | None]:
        convert_where_wanted(model, self.formats)
        if self.stage < 3:
            model = model.to(get_current_device())
        wrapped, _ = lay_out(model, optimizer, self.mesh, self.settings, self.policy, self.scaler)
        follow_history(model, self.formats, wrapped, self.mesh, "dp")
        if wrapped is not None and self.verbose and dist.get_rank() == 0:
            for bucket in wrapped.buckets:
                plan = bucket.plan
                print(
                    f"bucket {bucket.index}: {len(plan.slots)} parameters, {plan.numel:,} elements of "
                    f"{plan.family.dtype}"
                )
        share_all(model, self.mesh.group("dp"))
        waits = self.stage == 3 and self.mesh.size("zero") > 1
        return LowLevelZeroModel(model, self.policy, self.cast_inputs, wrapped, waits), wrapped


def _group_size(zero_group_size: int | None, extra_dp_size: int) -> int | None:
    if extra_dp_size == 1:
        return zero_group_size
    world = dist.get_world_size()
    if zero_group_size is not None:
        raise ValueError(
            f"zero_group_size={zero_group_size} and extra_dp_size={extra_dp_size} say the same thing: give one of them"
        )
    if extra_dp_size < 1 or world % extra_dp_size:
        raise ValueError(
            f"extra_dp_size={extra_dp_size} does not divide world_size={world}: it is the number of groups that shard "
            "by themselves"
        )
    return world // extra_dp_size
