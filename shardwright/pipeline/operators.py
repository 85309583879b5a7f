"""What an operator of torch does to the tensors that it is given, by its schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

# By which Python reads a tensor, and no operator tells of it.
PAST_OPERATORS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
SHAPES_FOLLOW_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

# They write to running statistics, which their schemas do not tell.
_NORMS_WITH_STATISTICS = frozenset(["aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"])


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def reads_data(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator tells the host what is in a tensor. Indexing does so for masks only."""
    if func is torch.ops.aten.index.Tensor:
        return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return any(tag in func.tags for tag in SHAPES_FOLLOW_DATA)


def may_write(func: Any) -> bool:
    return func._schema.is_mutable or func._schema.name in _NORMS_WITH_STATISTICS


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that an operator writes to."""
    if func._schema.name in _NORMS_WITH_STATISTICS and args[5]:  # in training
        yield from tensors_in(args[3:5])
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in([args[place] if place < len(args) else kwargs.get(argument.name)])
