"""What the processor of a CPU rank takes for being one of several, for `calibration`: steps of models that have hardly
anything to compute, in layouts of two ranks, beside the same models alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from .measure import Size, step_seconds

_LAYERS = 4  # and 1
_COLLECTIVES = 4  # of a layer of Llama that two tensor-parallel ranks share, forward and backward


def layouts(
    model: Callable[[int], nn.Module],
    batch: Callable[[int, int], Mapping[str, Any]],
    size: Size,
    alone: Mapping[str, float],
) -> dict[str, float]:
    """Keys of `Calibration.host`: see `machines.Host`. This process must be one of the two ranks of a job.

    model, batch   with so many layers; of so many samples, which begin with a number
    alone          what `measure.host` has found
    """

    def step(layers: int, samples: int = 1, begin: int = 0, **options: Any) -> float:
        """The mean of both ranks."""
        everywhere = [0.0, 0.0]
        own = step_seconds(model(layers), batch(samples, begin), size, **options)
        dist.all_gather_object(everywhere, own)
        return sum(everywhere) / 2

    def of_layer(**options: Any) -> tuple[float, float]:
        """For a layer, and for a step beside layers, what is more than alone."""
        few, many = step(1, **options), step(_LAYERS, **options)
        layer = (many - few) / (_LAYERS - 1)
        return max(layer - alone["layer"], 0.0), max(few - layer - alone["around"] - alone["step"], 0.0)

    tensors = len(list(model(2).parameters())) - len(list(model(1).parameters()))
    found = {
        "collective": of_layer(tp_size=2)[0] / _COLLECTIVES,
        "answered": of_layer(tp_size=2, clock=time.perf_counter)[0] / _COLLECTIVES,
    }
    for stage, name in ((1, ""), (3, "gathering ")):
        hooks, found[f"{name}replicas"] = of_layer(zero_stage=stage, begin=dist.get_rank())
        found[f"{name}hooks"] = hooks / tensors
    microbatch = {}
    for style in ("1f1b", "zb"):
        one, four = (step(_LAYERS, samples, pp_size=2, pp_style=style, num_microbatches=samples) for samples in (1, 4))
        microbatch[style] = (four - one) / 3
    computed = (_LAYERS * alone["layer"] + alone["around"]) / 2
    found["action"] = max(microbatch["1f1b"] - computed, 0.0) / 2
    found["waiting"] = max(microbatch["zb"] - microbatch["1f1b"], 0.0) / (_LAYERS / 2)
    return found
