"""Helpers on tensors and nested structures of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from . import pytree

T = TypeVar("T")


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's data of a DTensor, sharing storage; a plain tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def map_tensors(function: Callable[[torch.Tensor], Any], tree: T) -> T:
    """`tree` with `function` applied to every tensor in it (dict, list, tuple, transformers' ModelOutput)."""
    return pytree.tree_map_only(torch.Tensor, function, tree)


def to_device(tree: T, device: torch.device) -> T:
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), tree)


def is_unmoved(made: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether `made`, by a conversion of `tensor`, is the same data: torch returns a tensor itself where there is nothing to convert."""
    if made is tensor:
        return True
    return hasattr(tensor, "to_local") and (made.dtype, made.device, made.shape) == (tensor.dtype, tensor.device, tensor.shape)
