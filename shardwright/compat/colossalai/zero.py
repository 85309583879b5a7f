"""`LowLevelZeroPlugin` with the defaults of Colossal-AI's."""

from __future__ import annotations

import torch

from ...plugins import LowLevelZeroPlugin as NativePlugin
from ...utils.argument_types import check_arguments
from ...zero.layout import BUCKET_SIZE_IN_M
from .plugin_bases import DPPluginBase

_SCALE = 2**32


class LowLevelZeroPlugin(NativePlugin, DPPluginBase):
    def __init__(
        self,
        stage: int = 1,
        precision: str = "fp16",
        initial_scale: float = _SCALE,
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
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        check_arguments(LowLevelZeroPlugin.__init__, arguments)
        if precision != "fp16" and initial_scale == _SCALE:
            del arguments["initial_scale"]  # a default asks for nothing, and only fp16 scales the loss
        super().__init__(**arguments)
