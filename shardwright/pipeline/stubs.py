"""What stands for tensors that a stage does not read: NaN in their shapes, so that a stage that did read them could not
go unnoticed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

from ..utils import pytree
from .in_place import Given, output_shapes


class _Run(Protocol):
    """Of a stage: see `StageRun`."""

    live: frozenset[str]
    trace: Any


def stub_call(name: str, module: nn.Module, known: bool, current: Callable[[], _Run | None]) -> Callable[..., Any]:
    """The call of `module`. known: it ran in the dry run; current: the stage that runs."""
    shapes: dict[Any, tuple[list[Any], pytree.TreeSpec]] = {}

    def call_stub(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        run = current()
        if run is None or name in run.live:
            return call(*args, **kwargs)
        if not known:
            raise ValueError(
                f"{name} runs on this batch, but did not in the dry run from which the pipeline stages were cut; "
                "pass a batch like this one as example_inputs= to the plugin, so that every stage that needs it "
                "gets it"
            )
        if run.trace is not None:
            return run.trace.stub(lambda: imitate(call, args, kwargs), (args, kwargs))
        return imitate(call, args, kwargs)

    def imitate(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (
            spec,
            tuple((leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves),
        )
        if key in shapes:
            found, structure = shapes[key]
        else:
            output, follows = output_shapes(module, call, args, kwargs)
            found, structure = pytree.tree_flatten(output)
            if follows:
                shapes[key] = found, structure
        device = next((leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.device("cpu"))

        def made(leaf: Any) -> Any:
            if isinstance(leaf, Given):  # who reads it does not read what the module makes
                return leaves[leaf.number]
            return _made_like(leaf, device) if isinstance(leaf, torch.Tensor) else leaf

        return pytree.tree_unflatten([made(leaf) for leaf in found], structure)

    return call_stub


def absent_like(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """In the memory of one element, which nobody may write to. What is no floating number is known to all."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    nothing = torch.full((), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return nothing.expand(tensor.shape if shape is None else tuple(shape))


def _made_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Of numbers that are indices, perhaps, zeros."""
    value = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device=device)


def is_making_absent() -> bool:
    """Whether the running operator makes what stands here for what is not held; asked from below it, in a mode."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in (absent_like.__code__, _made_like.__code__):
            return True
        frame = frame.f_back
    return False
