"""Dry runs that know the whole numbers of a batch: ids, masks, grids of images.

What follows from them alone is computed on the CPU; everything that meets a tensor without data has none either. So a
model can count the places of images in a text, or cut what it has made of them by a grid, and the rest is shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..utils.pytree import tree_leaves, tree_map_only
from ..utils.tensors import map_tensors
from .dry_run import MadeUpValues, call_model

_aten = torch.ops.aten
_META = torch.device("meta")


class KnownValues(MadeUpValues):
    """Tensors on the CPU have data, those on the meta device have none; both may meet."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = [tensor for tensor in tensors if not tensor.is_meta]
        if len(known) == len(tensors):
            if kwargs.get("device") == _META and (known or _makes_whole_numbers(func, args, kwargs)):
                kwargs = {**kwargs, "device": torch.device("cpu")}
            return func(*args, **kwargs)
        if known:
            if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and not args[0].is_meta:
                raise RuntimeError(f"{func} writes what is not known to a tensor with data")
            if func is _aten.index.Tensor:
                args = (args[0], [place for index in args[1] for place in _places(index)])
            args, kwargs = tree_map_only(torch.Tensor, _without_data, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _makes_whole_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point and not dtype.is_complex
    return func.overloadpacket is _aten.arange and all(isinstance(value, int) for value in args)


def _places(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """A mask as the indices that it stands for."""
    if index is None or index.is_meta or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return index.nonzero(as_tuple=True)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


@contextmanager
def knowing_whole_numbers() -> Iterator[KnownValues]:
    """Inside, models on the meta device run on what `known` gives."""
    with KnownValues() as mode, torch.device("meta"):
        yield mode


def known(value: Any) -> Any:
    """Tensors of whole numbers and truth values on the CPU, the others without data."""
    return map_tensors(lambda tensor: tensor.to("meta") if tensor.is_floating_point() else tensor.cpu(), value)


def run_knowing(model: nn.Module, batch: Any, within: AbstractContextManager[Any] | None = None) -> Any:
    """Output of `model`, a `meta_copy`, for a batch whose whole numbers are known. within: see `run_dry`."""
    batch = known(batch)
    with knowing_whole_numbers(), torch.enable_grad(), within or nullcontext():
        return call_model(model, batch)
