"""`GeminiPlugin`: parameters, gradients and optimizer states sharded over the data-parallel ranks, as ZeRO-3."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from ...plugins import HybridParallelPlugin as NativePlugin
from ...plugins.without_effect import WithoutEffect, tell
from ...utils.argument_types import check_arguments
from .plugin_bases import DPPluginBase

_CHUNKS = "parameters are sharded layer by layer, not in chunks whose size is searched"
# Arguments that steer what does not exist here.
_NOTHING_TO_STEER = {
    "chunk_config_dict": _CHUNKS,
    "chunk_init_device": "LazyInitContext builds a model without its weights",
    "enable_gradient_accumulation": "gradients of several backwards always add up until the step",
    "warmup_non_model_data_ratio": "memory is not measured in a first step",
    "steady_cuda_cap_ratio": "memory is not measured in a first step",
    "pin_memory": "host memory that a GPU reads is always pinned",
    "strict_ddp_mode": "parameters are always sharded over all ranks of a group",
    "search_range_m": _CHUNKS,
    "hidden_dim": _CHUNKS,
    "min_chunk_size_m": _CHUNKS,
    "memstats": "memory is not measured in a first step",
    "gpu_margin_mem_ratio": "nothing is moved to the GPU because there is room",
    "verbose": "print(plugin.layout) shows the layout of the model boosted last",
}
_SHARED = (
    *("precision", "initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
    *("max_scale", "max_norm", "tp_size", "enable_all_optimization", "enable_fused_normalization", "enable_jit_fused"),
    *("enable_flash_attention", "enable_sequence_parallelism", "use_fp8", "fp8_communication"),
)


class GeminiPlugin(NativePlugin, DPPluginBase):
    """`shard_param_frac` is 1 (ZeRO-3) or 0 (ZeRO-2), `offload_optim_frac` 0 or 1: a part of either is not offered."""

    argument_advice = {
        "pp_size": "use HybridParallelPlugin(pp_size=...)",
        "zero_stage": "use shard_param_frac=1.0 or 0.0",
    }

    def __init__(
        self,
        chunk_config_dict: dict[str, Any] | None = None,
        chunk_init_device: torch.device | None = None,
        placement_policy: str = "static",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: str = "fp16",
        master_weights: bool = True,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: Any = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_jit_fused: bool = False,
        enable_async_reduce: bool = True,
        use_fp8: bool = False,
        verbose: bool = False,
        fp8_communication: bool = False,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(GeminiPlugin.__init__, arguments)
        _refuse(arguments)
        super().__init__(
            pp_size=1,
            zero_stage=3 if shard_param_frac else 2,
            cpu_offload=offload_optim_frac == 1.0,
            gather_ahead=max_prefetch or None,
            overlap_communication=enable_async_reduce,
            zero_group_size=_group_size(tp_size, extra_dp_size),
            **{name: arguments[name] for name in _SHARED},
        )
        defaults = {name: each.default for name, each in inspect.signature(type(self)).parameters.items()}
        found = tuple(
            WithoutEffect(name, arguments[name], why)
            for name, why in _NOTHING_TO_STEER.items()
            if arguments[name] is not defaults[name] and arguments[name] != defaults[name]
        )
        tell(found)
        self.without_effect += found


def _refuse(arguments: dict[str, Any]) -> None:
    """ValueError for what asks for something that cannot be had."""
    if arguments["placement_policy"] != "static":
        raise ValueError(
            f"placement_policy={arguments['placement_policy']!r}: chunks are not moved as memory fills up; use "
            "'static', with offload_optim_frac=1.0 to keep masters and optimizer states in host memory"
        )
    for name, wholes in (("shard_param_frac", "1.0 (ZeRO-3) or 0.0 (ZeRO-2)"), ("offload_optim_frac", "0.0 or 1.0")):
        if arguments[name] not in (0.0, 1.0):
            raise ValueError(f"{name}={arguments[name]}: a part of them is not offered; use {wholes}")
    if arguments["offload_param_frac"]:
        raise ValueError(
            f"offload_param_frac={arguments['offload_param_frac']}: weights stay on the device; use 0.0, with "
            "offload_optim_frac=1.0 for masters and optimizer states"
        )
    if not arguments["master_weights"]:
        raise ValueError(
            "master_weights=False: GeminiPlugin steps on fp32 masters here; use True, or "
            "LowLevelZeroPlugin(stage=3, master_weights=False)"
        )
    if arguments["force_outputs_fp32"]:
        raise ValueError(
            "force_outputs_fp32=True: outputs keep the dtype that the model computes in; use False, and outputs.float()"
        )
    if arguments["norm_type"] != 2.0:
        raise ValueError(
            f"norm_type={arguments['norm_type']} must be 2.0: steps clip by the 2-norm; use "
            "optimizer.clip_grad_by_norm for others"
        )


def _group_size(tp_size: int, extra_dp_size: int) -> int | None:
    """Ranks of a group that shards by itself."""
    if extra_dp_size == 1 or not dist.is_initialized():
        return None
    ranks = dist.get_world_size() // tp_size
    if extra_dp_size < 1 or ranks % extra_dp_size:
        raise ValueError(
            f"extra_dp_size={extra_dp_size} does not divide the {ranks} data-parallel ranks: it is the number of "
            "groups that shard by themselves"
        )
    return ranks // extra_dp_size
