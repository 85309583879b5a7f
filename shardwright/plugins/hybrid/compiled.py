"""`enable_jit_fused`: which layouts can have compiled layers, and letting a model have them."""

from __future__ import annotations

from collections import Counter

from torch import nn

from ...models.config import config_of, parts
from ...ops.layer_graphs import compile_layers, layers_of, require_compiler
from ...shardformer.experts import is_routed
from ..settings import HybridSettings
from .sequence_tensor import TENSOR_MODES


def check_compiled(settings: HybridSettings) -> None:
    """ValueError for what compiled layers cannot be combined with, before there is a model."""
    if not settings.sharding.enable_jit_fused:
        return
    pipeline = settings.pipeline
    if pipeline.num_sequence_slices > 1:
        raise ValueError(
            f"enable_jit_fused=True with num_sequence_slices={pipeline.num_sequence_slices}: layers that are given the "
            "keys and values of earlier slices would be compiled once per layer and slice; use num_sequence_slices=1, "
            "or leave enable_jit_fused out"
        )
    config = pipeline.gradient_checkpoint_config
    if config is not None and (config.selective_ratio or any(config.num_selective_layers_per_stage or ())):
        raise ValueError(
            "enable_jit_fused=True with selective recomputation (selective_ratio, num_selective_layers_per_stage): "
            "which operators keep their outputs is chosen one by one as they run, and those of a compiled layer do "
            "not; use gradient_checkpointing_ratio or num_ckpt_layers_per_stage, or leave enable_jit_fused out"
        )


def compiled_words(model: nn.Module, settings: HybridSettings) -> str:
    """What is compiled, for the layout report; ValueError where there is nothing that could be."""
    if not settings.sharding.enable_jit_fused:
        return ""
    kinds = Counter((type(layer).__name__, _in_parts(layer, model, settings)) for _, layer in layers_of(model))
    return "compiled: " + ", ".join(f"{number} x {name}{parts}" for (name, parts), number in kinds.items())


def _in_parts(layer: nn.Module, model: nn.Module, settings: HybridSettings) -> str:
    """What keeps a layer from being one graph, as far as it is known before it runs."""
    if not any(map(is_routed, layer.modules())):
        return ""
    configs = list(parts(config_of(model)))
    if settings.layout.ep_size > 1:
        why = f"ep_size={settings.layout.ep_size}"
    elif settings.sequence_mode in TENSOR_MODES:
        why = f"sequence_parallelism_mode={settings.sequence_mode!r}"
    elif any(getattr(part, "_experts_implementation", None) == "eager" for part in configs):
        why = "experts_implementation='eager'"
    elif any(getattr(part, "output_router_logits", False) for part in configs):
        why = "output_router_logits=True"
    else:
        return ""
    return f" in parts ({why})"


def compile_where_wanted(model: nn.Module, settings: HybridSettings, apart: bool) -> None:
    """Sharding comes first, gates of stages and hooks of ZeRO behind it.

    apart   whether weight gradients wait for the schedule
    """
    if settings.sharding.enable_jit_fused:
        compile_layers(model, apart)


def require_compiler_where_wanted(settings: HybridSettings) -> None:
    """On the machine that trains, not where a layout is planned."""
    if settings.sharding.enable_jit_fused:
        require_compiler()
