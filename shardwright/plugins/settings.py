"""The settings of `HybridParallelPlugin`, grouped by concern and checked once.

The plugin's flat keyword arguments are dealt to these dataclasses by field name, so every argument has exactly one home
and none can be forgotten: `HybridSettings.deal` fails on an argument without a home.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from ..pipeline.settings import PipelineSettings
from ..precision.fp8 import Fp8Options
from ..precision.policy import PRECISIONS
from ..precision.scaler import ScalerConfig
from ..shardformer.config import ShardingOptions
from ..shardformer.policies.auto import has_policy
from ..shardformer.policies.base import Policy
from ..shardformer.policies.inferred import AUTO, InferredPolicy
from ..utils.errors import one_of
from ..zero.settings import ZeroSettings, check_bucket_size

T = TypeVar("T")
_ZERO_NAMES = {"stage": "zero_stage", "bucket_size_in_m": "zero_bucket_size_in_m"}
PRECISION_NAMES = (*PRECISIONS, "fp8")
SEQUENCE_MODES = ("split_gather", "ring", "all_to_all", "ring_attn")


@dataclass(frozen=True, kw_only=True)
class LayoutSettings:
    """How many ranks each axis has.

    tp_size, pp_size   ranks that share every layer; ranks that hold successive layers
    sp_size            ranks that share every sequence
    ep_size            data-parallel ranks that share the experts of every layer, each holding some of them whole (or
                       their part of tp); it divides the data-parallel ranks
    dp_outside         data-parallel ranks are the outermost axis of the mesh, so that a pipeline stays within few nodes
    zero_group_size    ZeRO-1.5: optimizer shards live inside groups of this many data-parallel ranks; None, 0 or
                       less: all of them
    inner_ring_size    of the two-level ring of ring attention
    ulysses_size       neighbours in sp that trade sequences for heads, inside of ring attention over sp / ulysses
    """

    tp_size: int
    pp_size: int
    sp_size: int | None
    dp_outside: bool
    zero_group_size: int | None
    inner_ring_size: int | None
    ep_size: int = 1
    ulysses_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("sp_size", "inner_ring_size", "ulysses_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name}={size} must be at least 1, or None")

    def check(self, zero_stage: int) -> None:
        """Refuse what does not fit ZeRO of this stage."""
        if zero_stage == 0 and self.zero_group_size is not None:
            raise ValueError(
                f"zero_group_size={self.zero_group_size} with zero_stage=0: stage 0 shards nothing, so there are no "
                "groups to shard in; use zero_stage=1, 2 or 3, or leave zero_group_size out"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings:
    """Number formats.

    precision           the dtype parameters work in; "fp8" is "bf16" with use_fp8=True
    use_fp8             linears of the layers multiply in 8 bits (see `ops.fp8`)
    fp8_options         how they do
    fp8_communication   activations, gradients and weights travel in 8 bits (see `comm.quantised_wire`)

    fp8, fp8_words      what was asked of products in 8 bits, as options and in words; None: nothing
    working             the dtype of parameters, by the name of a precision
    """

    precision: str
    use_fp8: bool
    fp8_communication: bool
    fp8_options: Any = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISION_NAMES:
            raise one_of("precision", self.precision, PRECISION_NAMES)
        options = Fp8Options.of(self.fp8_options)
        if self.fp8 is None:
            if self.fp8_options is not None:
                raise ValueError(
                    f"fp8_options={self.fp8_options!r} with precision={self.precision!r} and use_fp8=False: nothing is "
                    "computed in fp8; use precision='fp8', or leave fp8_options out"
                )
        elif options.granularity == "rowwise" and self.working != "bf16" and not options.emulate:
            raise ValueError(
                f"fp8_options.granularity='rowwise' with precision={self.precision!r}: GPUs write rowwise products in "
                "bf16 alone; use precision='fp8', or granularity='tensorwise'"
            )

    @property
    def fp8(self) -> Fp8Options | None:
        return Fp8Options.of(self.fp8_options) if self.use_fp8 or self.precision == "fp8" else None

    @property
    def fp8_words(self) -> str:
        return "precision='fp8'" if self.precision == "fp8" else "use_fp8=True"

    @property
    def working(self) -> str:
        return "bf16" if self.precision == "fp8" else self.precision


@dataclass(kw_only=True)
class ShardingSettings(ShardingOptions):
    """How layers are sharded, by which policy.

    custom_policy               a policy; "auto" infers a plan and tries it on a small copy (see `InferredPolicy`); None
                                takes what was registered or comes with the package, or infers
    enable_fused_cross_entropy  losses of a head's logits that nobody reads are computed without them, a few tokens at
                                a time (see `kernels.linear_cross_entropy`); False keeps logits whole
    """

    custom_policy: Any = None
    enable_fused_cross_entropy: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_parallelism_mode not in (None, *SEQUENCE_MODES):
            raise one_of("sequence_parallelism_mode", self.sequence_parallelism_mode, SEQUENCE_MODES)
        if self.custom_policy not in (None, AUTO) and not isinstance(self.custom_policy, Policy):
            made = " (an instance, not the class)" if isinstance(self.custom_policy, type) else ""
            raise ValueError(
                f"custom_policy={self.custom_policy!r} must be a shardformer Policy{made}, {AUTO!r} to infer a plan "
                "and try it on a small copy, or None to find one for the model"
            )

    def policy_for(self, model: nn.Module, tp_size: int) -> Policy | None:
        """The policy to shard with; None finds one."""
        if self.custom_policy != AUTO:
            return self.custom_policy
        return InferredPolicy() if tp_size > 1 or not has_policy(model) else None

    def sharding_only(self, pp_size: int) -> str:
        """The name of a policy that does nothing but shard; empty for none, and for one that does more."""
        if self.acting_policy is None:
            return self.custom_policy or "" if pp_size == 1 else ""  # "auto" finds layers, too
        return "" if self.acting_policy.acts_without_sharding else type(self.acting_policy).__name__

    @property
    def acting_policy(self) -> Policy | None:
        """A policy of the user's, which may change a model whose layers are whole."""
        return None if self.custom_policy == AUTO else self.custom_policy


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What replicas of a model do alike, in the words of DistributedDataParallel.

    ddp_bucket_cap_mb       megabytes of fp32 gradients per bucket, for zero_stage=0
    broadcast_buffers       every training forward starts with rank 0's persistent buffers (running statistics) on all
                            data-parallel ranks
    find_unused_parameters  parameters without a gradient are always found, at no cost; refused at stage 3, where all
                            ranks must use the same layers
    static_graph, gradient_as_bucket_view
                            wishes of DistributedDataParallel that always hold here: gradients are views of buckets
    """

    ddp_bucket_cap_mb: float
    broadcast_buffers: bool
    find_unused_parameters: bool
    check_reduction: bool
    gradient_as_bucket_view: bool
    static_graph: bool

    def __post_init__(self) -> None:
        check_bucket_size("ddp_bucket_cap_mb", self.ddp_bucket_cap_mb, usual=25, element=4 / 2**20)
        if self.check_reduction:
            raise ValueError(
                "check_reduction=True was withdrawn by torch's DistributedDataParallel and has no "
                "counterpart; leave it False"
            )

    def check(self, zero_stage: int) -> None:
        """Refuse what does not fit ZeRO of this stage."""
        if self.find_unused_parameters and zero_stage == 3:
            raise ValueError(
                "find_unused_parameters=True with zero_stage=3: every rank must use the same layers in a step, because "
                "all ranks gather them together (parameters that no rank uses are found without it); use zero_stage=0, "
                "1 or 2, where ranks may differ"
            )

    def bucketed(self, zero: ZeroSettings) -> ZeroSettings:
        """With the buckets of DistributedDataParallel where there is no ZeRO."""
        return zero if zero.stage else replace(zero, bucket_size_in_m=self.ddp_bucket_cap_mb * 2**20 / 4 / 1e6)


@dataclass(frozen=True)
class HybridSettings:
    """All of it."""

    layout: LayoutSettings
    precision: PrecisionSettings
    scaler: ScalerConfig
    sharding: ShardingSettings
    pipeline: PipelineSettings
    zero: ZeroSettings
    replicas: ReplicaSettings

    @property
    def sequence_mode(self) -> str | None:
        """Of sequence parallelism; None where it is off, or there are no ranks for it. Where none is named, it follows
        from the ranks that there are.
        """
        if not self.sharding.enable_sequence_parallelism:
            return None
        if self.sharding.sequence_parallelism_mode is not None:
            return self.sharding.sequence_parallelism_mode
        over_axis = "all_to_all" if (self.layout.sp_size or 1) > 1 else None
        return over_axis or ("split_gather" if self.layout.tp_size > 1 else None)

    @classmethod
    def deal(cls, flat: Mapping[str, Any]) -> HybridSettings:
        """Deal flat keyword arguments to their groups."""
        taken: set[str] = set()

        def group(home: type[T], names: Mapping[str, str] = MappingProxyType({})) -> T:
            """`names`: of fields that the argument has another name for."""
            of_field = {each.name: names.get(each.name, each.name) for each in fields(home)}  # type: ignore[arg-type]
            given = {each: flat[argument] for each, argument in of_field.items() if argument in flat}
            taken.update(of_field[each] for each in given)
            return home(**given, **({"names": names} if names else {}))

        settings = cls(
            group(LayoutSettings),
            group(PrecisionSettings),
            group(ScalerConfig),
            group(ShardingSettings),
            group(PipelineSettings),
            group(ZeroSettings, _ZERO_NAMES),
            group(ReplicaSettings),
        )
        assert taken == set(flat), f"no settings group takes {sorted(set(flat) - taken)}"
        settings.pipeline.check(settings.layout.pp_size)
        settings.layout.check(settings.zero.stage)
        settings.replicas.check(settings.zero.stage)
        zero = replace(
            settings.zero,
            quantises=settings.precision.fp8_communication,
            compiles=settings.sharding.enable_jit_fused,
        )
        return replace(settings, zero=settings.replicas.bucketed(zero))
