"""One cell on the ranks of a world."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._decomp import get_decompositions

from ...ops import layer_graphs
from ..exact import keep_float64
from .axes import Axis, not_applicable
from .subject import Built
from .times import times
from .train import Result, train
from .uses import generate, lazy, lora, round_trip, xformers

KINDS: dict[str, Callable[[Built, Axis], Result]] = {
    "train": train,
    "xformers": xformers,
    "lora": lora,
    "lazy": lazy,
    "round_trip": round_trip,
    "generate": generate,
    "times": times,
}
_PACKAGE = str(Path(__file__).parents[2])


def run_cell(built: Built, axis: Axis) -> Result:
    """`outcome` and what belongs to it. Raises what the model or the layout raises, other than wrong numbers."""
    reason = not_applicable(axis, built)
    if reason:
        return {"outcome": "not applicable", "why": reason}
    layer_graphs.backend = _as_traced  # code that inductor makes takes a minute to compile, and is not what is tried
    with nullcontext() if axis.kind == "times" else keep_float64():
        return KINDS[axis.kind](built, axis)


def _as_traced(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """torch.compile's backend "aot_eager", which runs the operators of a graph as they are, but for one that inductor
    does not run either: of torch's `softplus_backward` a trace has other strides than what it computes on a CPU where
    its two inputs differ in theirs, so that a view behind it fails.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(  # type: ignore
        fw_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
        decompositions=get_decompositions([torch.ops.aten.softplus_backward]),
    )(graph, inputs)


def is_refusal(error: BaseException) -> bool:
    """Whether it is a ValueError that this package raised itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and bool(frames) and frames[-1].filename.startswith(_PACKAGE)
