"""Marks on tensors that hold this rank's columns of a vocabulary, and the error of those who need all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .collective import copy_to_group, gather_from_group
from .vocab_shard import VocabShard

_MARK = "_shardwright_vocab"


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class SplitVocabularyError(ValueError):
    """Something needs all columns of logits, of which this rank holds some."""


class Mark(NamedTuple):
    shard: VocabShard
    dim: int  # that holds the vocabulary, counted from the front
    # `.float()` was asked for; the loss computes in fp32 anyway, so the copy is made only if something else needs it
    promote: bool = False


class Call(NamedTuple):
    """`func(*args, **kwargs)` on marked tensors.

    name        of the function; of a property with a dot in front
    logits      first marked tensor among the arguments
    by_script   whether it comes from a script, not from the forward of a model
    """

    func: Callable[..., Any]
    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    logits: Tensor
    mark: Mark
    by_script: bool

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


def mark_of(value: Any) -> Mark | None:
    return getattr(value, _MARK, None)


def is_marked(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, _MARK)


def first_marked(values: Sequence[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            if hasattr(value, _MARK):
                return value
        elif isinstance(value, list | tuple):
            found = first_marked(value)
            if found is not None:
                return found
    return None


def hand_on(result: Any, mark: Mark) -> Any:
    if isinstance(result, Tensor):
        setattr(result, _MARK, mark)
    return result


def hand_on_last(result: Tensor, mark: Mark) -> Tensor:
    """The vocabulary is the last dim of `result`."""
    return hand_on(result, mark._replace(dim=result.ndim - 1))  # type: ignore[no-any-return]


def whole_sizes(tensor: Tensor) -> torch.Size:
    """The shape that a tensor would have in one process."""
    mark = mark_of(tensor)
    if mark is None:
        return tensor.shape
    return torch.Size(mark.shard.size if dim == mark.dim else size for dim, size in enumerate(tensor.shape))


def whole_numel(tensor: Tensor) -> int:
    return math.prod(whole_sizes(tensor))


def gathered(tensor: Any) -> Any:
    """All columns of a marked tensor, without padding, on every rank; anything else as it is. Collective.

    [..., V_local, ...] -> [..., V, ...]; backward hands every rank its own columns, the consumers being replicated.
    """
    mark = mark_of(tensor)
    if mark is None:
        return tensor
    plain = tensor.as_subclass(Tensor) if type(tensor) is not Tensor else tensor
    whole = gather_from_group(plain, mark.shard.group, mark.dim).narrow(mark.dim, 0, mark.shard.size)
    return whole.float() if mark.promote else whole


def columns_of(operand: Any, mark: Mark, behind: int) -> Any:
    """This rank's columns of an operand [..., V, ...] that goes with logits [..., V_local, ...], zeros in the padding.

    behind  place of the vocabulary, counted from the back: 1 is the last dim

    Operands of one column, or without that dim, go with every rank's columns as they are. The gradient of an operand
    is summed over the ranks, each of which has the part of its columns.
    """
    if not isinstance(operand, Tensor) or is_marked(operand):
        return operand
    shard = mark.shard
    width = operand.shape[-behind] if operand.ndim >= behind else 1
    if width not in (1, shard.size) and width == shard.local:
        raise SplitVocabularyError(
            f"a tensor of shape {list(operand.shape)} meets logits of {shard.size} columns, of which this rank holds "
            f"{shard.local}: which columns it is for cannot be told; make it as wide as the whole vocabulary, or "
            "gather the logits first (shardformer.layer.whole_logits(logits), or parallel_output=False for all outputs)"
        )
    if operand.requires_grad and torch.is_grad_enabled() and not operand.is_meta:
        operand = copy_to_group(operand, shard.group)
    if width != shard.size or shard.size == shard.local:
        return operand
    padding = [0, 0] * (behind - 1) + [0, shard.local - shard.length]
    return F.pad(operand.narrow(-behind, shard.start, shard.length), padding)


def unsupported(what: str, mark: Mark) -> SplitVocabularyError:
    return SplitVocabularyError(
        f"{what} is not possible on logits of which this rank holds {mark.shard.local} of {mark.shard.size} columns; "
        "gather them on all ranks of the group (shardformer.layer.whole_logits(logits), or parallel_output=False for "
        "all outputs); F.cross_entropy takes them as they are"
    )
