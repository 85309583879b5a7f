"""Running a model on tensors without data, to learn who reads what.

The model is copied to the meta device (shapes only, no memory) and called with a small example batch. Values that its
forward asks for on the way (`.item()`, `if mask.all()`, `nonzero`) are answered with zeros: they steer masks and expert
routing, which do not change which module feeds which. Collectives of such tensors are answered at once, as if every
rank had sent what they need.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..comm.compat import finished_work
from ..utils.pytree import TorchDispatchMode, tree_leaves
from ..utils.tensors import map_tensors
from .meta_results import compute, find_result

_aten = torch.ops.aten


class MadeUpValues(TorchDispatchMode):
    """Data-dependent operators on meta tensors return something of a shape that models go on with.

    truth           what truth values are taken to be
    collectives     how many were answered
    """

    def __init__(self, truth: bool = False) -> None:
        super().__init__()
        self.collectives = 0
        self._truth = truth

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if func.namespace == "c10d" and all(
            tensor.is_meta for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)
        ):
            self.collectives += 1
            return (first, finished_work()) if len(func._schema.returns) == 2 else finished_work()
        if isinstance(first, torch.Tensor) and first.is_meta:
            found = find_result(func, args, kwargs or {})
            if found is not None:
                return found
            if func is _aten._local_scalar_dense.default:
                return self._truth if first.dtype == torch.bool else 0.0 if first.dtype.is_floating_point else 0
            if func is _aten.nonzero.default:
                return nonzero_of(first)
            if func is _aten.index.Tensor and any(mask is not None and mask.dtype == torch.bool for mask in args[1]):
                indices = [
                    i
                    for mask in args[1]
                    for i in (nonzero_of(mask).unbind(1) if mask is not None and mask.dtype == torch.bool else (mask,))
                ]
                return func(first, indices)
            if func is _aten.masked_select.default:
                # as if all were chosen
                return first.new_empty(torch.broadcast_shapes(first.shape, args[1].shape).numel())
            if func is _aten.unique_consecutive.default:
                return first.new_empty(1), first.new_empty(0, dtype=torch.long), first.new_empty(0, dtype=torch.long)
            if func is _aten._grouped_mm.default and first.dim() == 2 and args[1].dim() == 3:
                # Its shape rule accepts bfloat16 alone; the shape is the same for every dtype: [T, K] x [E, K, N] ->
                # [T, N].
                return first.new_empty((first.shape[0], args[1].shape[2]))
        return compute(func, args, kwargs or {})


def nonzero_of(mask: torch.Tensor) -> torch.Tensor:
    """As if one element were set for each index of dim 0: one token per sample, one routed token per expert."""
    return mask.new_empty((mask.shape[0] if mask.dim() else 1, mask.dim()), dtype=torch.long)


@contextmanager
def without_data(truth: bool = False) -> Iterator[MadeUpValues]:
    """Inside, modules whose tensors are all on the meta device run although there is no data."""
    with MadeUpValues(truth) as made_up, torch.device("meta"):
        yield made_up


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of `model` on the meta device, in training mode, all floating parameters requiring gradients, no
    activation checkpointing.
    """
    copied = _copy(model, lambda tensor: torch.empty_like(tensor, device="meta"))
    copied.train()  # which a model of a script's own may override, and return nothing from
    return copied


def weight_sharing_copy(model: nn.Module) -> nn.Module:
    """A copy whose parameters share the memory of the model's, in evaluation mode; whatever else its forward changes
    is its own.
    """
    copied = _copy(model, torch.Tensor.detach)
    copied.train(False)
    return copied


def _copy(model: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    # Most of what a module consists of is ten dictionaries of hooks with nothing in them, which take deepcopy longest.
    memo: dict[int, Any] = {
        id(value): OrderedDict()
        for module in model.modules()
        for value in vars(module).values()
        if type(value) is OrderedDict and not value
    }
    for parameter in model.parameters():
        differentiable = parameter.is_floating_point() or parameter.is_complex()
        memo[id(parameter)] = nn.Parameter(make(parameter), requires_grad=differentiable)
    for buffer in model.buffers():
        copied_buffer = make(buffer)
        memo[id(buffer)] = copied_buffer if copied_buffer.is_meta else copied_buffer.clone()
    copied = copy.deepcopy(model, memo)
    for module in copied.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing = False  # type: ignore[assignment]
    return copied


def forward_defaults(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments that every call of the model under a pipeline gets: no key/value cache."""
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "use_cache" in parameters or (takes_any and getattr(getattr(model, "config", None), "use_cache", False)):
        return {"use_cache": False}
    return {}


def call_model(model: nn.Module, batch: Any) -> Any:
    """Output of `model` for `batch`, as everywhere under a pipeline."""
    defaults = forward_defaults(model)
    if isinstance(batch, Mapping):
        return model(**{**defaults, **batch})
    return model(*batch, **defaults) if isinstance(batch, list | tuple) else model(batch, **defaults)


def run_dry(
    model: nn.Module, batch: Any, truth: bool = False, within: AbstractContextManager[Any] | None = None
) -> Any:
    """Output of `model`, a `meta_copy`, for `batch` moved to the meta device; `truth` is the answer to `if mask.all()`
    and its like. within: a context that sees what the model does.
    """
    batch = map_tensors(lambda tensor: tensor.to("meta"), batch)
    with without_data(truth), torch.enable_grad(), within or nullcontext():
        return call_model(model, batch)
