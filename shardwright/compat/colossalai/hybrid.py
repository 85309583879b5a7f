"""`HybridParallelPlugin` and `MoeHybridParallelPlugin` with the arguments of Colossal-AI's in their order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ...pipeline.checkpointing import PipelineGradientCheckpointConfig
from ...plugins import HybridParallelPlugin as NativePlugin
from ...plugins.without_effect import warn_once
from ...utils.argument_types import check_arguments
from ...zero.layout import BUCKET_SIZE_IN_M
from .pipeline import PlannedByPlugin
from .plugin_bases import PipelinePluginBase

_ADVICE = {
    "stage": "it is called zero_stage",
    "dp_size": "leave it out: what the other sizes leave is data parallel",
    "zero_group_size": "it is an argument of shardwright.plugins.HybridParallelPlugin",
}
_ALONG_TENSOR = ("split_gather", "ring")


class HybridParallelPlugin(NativePlugin, PipelinePluginBase):
    """precision is "fp16" by default, as there. With pp_style="zbv" the schedule is planned here, and `scheduler_nodes`
    must be what `PipelineGraph` of this package gave, or None.
    """

    argument_advice: ClassVar[Mapping[str, str]] = {**_ADVICE, "ep_size": "use MoeHybridParallelPlugin(ep_size=...)"}

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        sp_size: int | None = None,
        precision: str = "fp16",
        zero_stage: int = 0,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        parallel_output: bool = True,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        zero_bucket_size_in_m: float = BUCKET_SIZE_IN_M,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        custom_policy: Any = None,
        pp_style: str = "1f1b",
        num_model_chunks: int = 1,
        scheduler_nodes: list[Any] | None = None,
        num_layers_per_stage: list[int] | None = None,
        gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None,
        enable_metadata_cache: bool = True,
        make_vocab_size_divisible_by: int = 64,
        dp_outside: bool = True,
        overlap_p2p: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        use_fp8: bool = False,
        inner_ring_size: int | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(HybridParallelPlugin.__init__, arguments)
        super().__init__(**_as_here(arguments))


class MoeHybridParallelPlugin(HybridParallelPlugin):
    """Experts are spread over `ep_size` data-parallel ranks. Every ZeRO stage and overlapped communication work."""

    argument_advice: ClassVar[Mapping[str, str]] = {**_ADVICE, "dp_outside": "it is called moe_dp_outside"}

    def __init__(
        self,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        sp_size: int | None = None,
        precision: str = "fp16",
        zero_stage: int = 0,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_parallelism: bool = False,
        sequence_parallelism_mode: str | None = None,
        parallel_output: bool = True,
        num_microbatches: int | None = None,
        microbatch_size: int | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0,
        broadcast_buffers: bool = True,
        ddp_bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        zero_bucket_size_in_m: float = BUCKET_SIZE_IN_M,
        cpu_offload: bool = False,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        custom_policy: Any = None,
        pp_style: str = "1f1b",
        num_model_chunks: int = 1,
        scheduler_nodes: list[Any] | None = None,
        num_layers_per_stage: list[int] | None = None,
        gradient_checkpoint_config: PipelineGradientCheckpointConfig | None = None,
        enable_metadata_cache: bool = True,
        make_vocab_size_divisible_by: int = 64,
        moe_dp_outside: bool = True,
        overlap_p2p: bool = True,
        overlap_allgather: bool = False,
        fp8_communication: bool = False,
        use_fp8: bool = False,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(MoeHybridParallelPlugin.__init__, arguments)
        arguments["dp_outside"] = arguments.pop("moe_dp_outside")
        NativePlugin.__init__(self, **_as_here(arguments))


def _as_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the native plugin."""
    arguments = dict(arguments)
    nodes = arguments.pop("scheduler_nodes")
    if nodes is not None and not isinstance(nodes, PlannedByPlugin):
        raise ValueError(
            'scheduler_nodes=[...] is a schedule made elsewhere: pp_style="zbv" plans itself; leave it out, or pass '
            "what PipelineGraph(...).get_v_schedule() of colossalai.pipeline.schedule.v_schedule gives here"
        )
    if nodes is not None and arguments["pp_style"] != "zbv":
        raise ValueError(f"scheduler_nodes with pp_style={arguments['pp_style']!r}: only 'zbv' takes it; leave it out")
    mode, size = arguments["sequence_parallelism_mode"], arguments["sp_size"]
    if arguments["enable_sequence_parallelism"] and mode in _ALONG_TENSOR and size is not None:
        if size not in (1, arguments["tp_size"]):
            warn_once(f"without effect here: sp_size={size} ({mode!r} cuts sequences over the tp_size ranks)")
        arguments["sp_size"] = None
    return arguments
