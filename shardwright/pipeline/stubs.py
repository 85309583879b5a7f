"""What stands for a module outside the layers on a stage that does not read what it returns: zeros of its shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from ..utils import pytree
from .in_place import output_shapes


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
            return run.trace.stub(lambda: imitate(call, args, kwargs))
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
        zeros = [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in found
        ]
        return pytree.tree_unflatten(zeros, structure)

    return call_stub
