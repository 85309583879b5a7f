"""Helpers on tensors and nested structures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch

from . import pytree

T = TypeVar("T")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's data of a DTensor, sharing storage; a plain tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def whole_tensor(param: torch.Tensor) -> torch.Tensor:
    """The parameter without the sharding of ZeRO-3 or FSDP (a collective where it has one); its spec stays on it."""
    gather = getattr(param, "full_tensor", None)  # of a DTensor
    if gather is None:
        return param
    whole: torch.Tensor = gather()
    whole.__dict__.update(param.__dict__)
    return whole


def map_tensors(function: Callable[[torch.Tensor], Any], tree: T) -> T:
    """`tree` with `function` applied to every tensor in it (dict, list, tuple, transformers' ModelOutput)."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Those that `map_tensors` meets, in its order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def numbers_for(like: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    """[n] of int64, only read, where `like` lies. They are sent there once: the host waits for a device when it sends
    it a list.
    """
    if type(like) is not torch.Tensor or torch.compiler.is_compiling():  # fake tensors and graphs want their own
        return torch.tensor(numbers, device=like.device)
    return _sent(numbers, like.device)


@lru_cache(maxsize=1024)
def _sent(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # an evaluation may be the first to ask
        return torch.tensor(numbers, device=device)


def multiply_(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all by one number, in place. A 0-d tensor enters in its own precision, also where the tensors have
    half.
    """
    if isinstance(factor, float):
        if factor != 1.0 and tensors:
            torch._foreach_mul_(list(tensors), factor)
        return
    for dtype in {tensor.dtype for tensor in tensors}:
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        if dtype.itemsize >= 4:
            torch._foreach_mul_(same, factor.to(same[0].device, dtype))
            continue
        # of one dim, or it would be rounded to `dtype` first
        wide = factor.to(same[0].device, torch.float32).reshape(1)
        for tensor in same:
            torch.mul(tensor, wide, out=tensor)


def is_unmoved(made: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `made`, by a conversion of `tensor`, is the same data: torch returns a tensor itself where there is
    nothing to convert.
    """
    if made is tensor:
        return True
    return hasattr(tensor, "to_local") and (made.dtype, made.device, made.shape) == (
        tensor.dtype,
        tensor.device,
        tensor.shape,
    )
