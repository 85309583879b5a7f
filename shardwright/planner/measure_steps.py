"""What steps of whole models take on CPU ranks, over what is predicted from a calibration without them.

    shares(calibration, measured)       measured: by ranks, `seconds`

One after the other in a loop, operators find their operands in the caches; in a step they fetch them, and memory that
the allocator has from the system. How much longer that takes is measured on a model, and counts for every other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..lazy import LazyInitContext
from ..plugins import HybridParallelPlugin
from .calibration import Calibration, calibrated
from .measure import Size, step_seconds
from .replay import Job
from .step_times import step_times

_SAMPLES, _LENGTH, _WORDS = 4, 128, 1024  # of a rank
_OPTIONS: dict[str, Any] = {"zero_stage": 1, "num_microbatches": 2}


def seconds(rank: int, world: int, size: Size) -> float:
    """Of a rank's processor, for a step without the optimizer's: the mean over the job, whose rank this process is."""
    everywhere = [0.0] * world
    own = step_seconds(_model(), _batch(rank), size, **_OPTIONS)
    dist.all_gather_object(everywhere, own)
    return sum(everywhere) / world


def shares(found: Calibration, measured: Mapping[int, float]) -> dict[str, float]:
    """`Calibration.whole`. This process must be in no process group."""
    return {str(world): taken / _predicted(found, world) for world, taken in measured.items()}


def _predicted(found: Calibration, world: int) -> float:
    times = step_times(Job(_plugin, _lazy, _adamw, _batch(0)), world, calibrated(found, "fp32", world))
    return times.processor - times.behind["optimizer"]


def _plugin(**changes: Any) -> HybridParallelPlugin:
    return HybridParallelPlugin(**{"precision": "fp32", **_OPTIONS, **changes})


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def _lazy() -> nn.Module:
    with LazyInitContext():
        return _model()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _batch(begin: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, _WORDS, (_SAMPLES, _LENGTH), generator=torch.Generator().manual_seed(begin))
    return {"input_ids": ids, "labels": ids}
