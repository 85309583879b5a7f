"""What the processor of a CPU rank takes for being one of several, for `calibration`: steps of models that have hardly
anything to compute, in layouts of two ranks, which take turns.

    step = layers * (layer + what the layout adds to it) + (what is around them) + (what the layout adds to a step)

A layer on one of two busy ranks takes longer than alone; how much longer a pipeline tells, which adds nothing to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from .measure import Size, rounds_of
from .measure_turns import Seconds, Turns, step_of, typical

_FEW, _MANY = 2, 8  # layers
_COLLECTIVES = 4  # of a layer of Llama that two tensor-parallel ranks share, forward and backward
_LEAST, _MOST = 0.5, 4.0  # times; beyond, it is the measurement that is wrong
_LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tp_size": 2},
    "replicas": {"zero_stage": 1},
    "gathering": {"zero_stage": 3},
}


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
    steps: dict[str, Callable[[int], None]] = {}
    for layers in (_FEW, _MANY):
        for name, options in _LAYOUTS.items():
            begin = 0 if "tp_size" in options else dist.get_rank()
            steps[f"{name}{layers}"] = step_of(model(layers), batch(1, begin), **options)
        for style in ("1f1b", "zb"):
            for samples in (1, 4):
                piped: dict[str, Any] = {"pp_size": 2, "pp_style": style, "num_microbatches": samples}
                steps[f"{style}{layers} {samples}"] = step_of(model(layers), batch(samples, 0), **piped)
    turns = Turns(steps, rounds_of(size))
    taken, more = turns.processor, _MANY - _FEW

    def microbatch(style: str, layers: int) -> Seconds:
        return (taken[f"{style}{layers} 4"] - taken[f"{style}{layers} 1"]) / 3

    def layer_of(name: str, times: Mapping[str, Seconds] = taken) -> Seconds:
        return (times[f"{name}{_MANY}"] - times[f"{name}{_FEW}"]) / more

    layer = (microbatch("1f1b", _MANY) - microbatch("1f1b", _FEW)) / (more / 2)
    slower = float(np.clip(np.median(layer) / alone["layer"], _LEAST, _MOST)) if alone["layer"] else 1.0
    around, step = slower * alone["around"], slower * alone["step"]
    tensors = (len(list(model(_MANY).parameters())) - len(list(model(_FEW).parameters()))) / more

    def hook_of(name: str) -> float:
        return typical(layer_of(name) - layer) / tensors

    def beside(name: str) -> float:
        return max(typical(taken[f"{name}{_FEW}"] - _FEW * layer_of(name)) - around - step, 0.0)

    return {
        "collective": typical(layer_of("tensor") - layer) / _COLLECTIVES,
        "answered": typical(layer_of("tensor", turns.clock) - layer) / _COLLECTIVES,
        "hooks": hook_of("replicas"),
        "replicas": beside("replicas"),
        "gathering hooks": hook_of("gathering"),
        "gathering replicas": beside("gathering"),
        "action": max(typical(microbatch("1f1b", _FEW) - layer * _FEW / 2) - around / 2, 0.0) / 2,
        "waiting": typical(microbatch("zb", _MANY) - microbatch("1f1b", _MANY)) / (_MANY / 2),
    }
