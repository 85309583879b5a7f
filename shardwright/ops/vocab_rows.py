"""Functions that move, deal, join or rescale the rows of marked logits: what they return is marked as well.

A function that would touch the vocabulary raises `SplitVocabularyError`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..utils import pytree
from .vocab_mark import (
    Call,
    Mark,
    columns_of,
    hand_on,
    hand_on_last,
    is_marked,
    mark_of,
    unsupported,
    whole_sizes,
)

# Functions that deal rows: their `dim` (first of the arguments at this place) must not be the vocabulary.
DEAL_ROWS = {"chunk": 2, "split": 2, "split_with_sizes": 2, "tensor_split": 2, "narrow": 1, "unbind": 1, "select": 1}
# Functions over a dim whose other tensors have the vocabulary where the logits have it.
_ALIGNED = frozenset({"gather", "scatter", "take_along_dim"})


def view(call: Call) -> Tensor:
    """A view whose last size is the vocabulary's."""
    sizes, mark = _sizes(call), call.mark
    if sizes[-1] == -1 and call.logits.numel() == math.prod(sizes[:-1]) * mark.shard.local:
        sizes[-1] = mark.shard.size
    if sizes[-1] != mark.shard.size:
        raise unsupported(f"{call.name}{tuple(sizes)}", mark)
    return hand_on_last(call.func(call.logits, [*sizes[:-1], mark.shard.local]), mark)


def expand(call: Call) -> Tensor:
    """More rows of the same."""
    sizes = _sizes(call)
    if len(sizes) < call.logits.ndim or sizes[-1] not in (-1, call.mark.shard.size):
        raise unsupported(f"expand{tuple(sizes)}", call.mark)
    return hand_on_last(call.logits.expand(*sizes[:-1], -1), call.mark)


def _sizes(call: Call) -> list[int]:
    given = call.args[1:] or tuple(call.kwargs.values())
    sizes = list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else list(given)
    is_last = call.mark.dim == call.logits.ndim - 1 and call.args[0] is call.logits
    if not is_last or not sizes or not all(isinstance(size, int) for size in sizes):
        raise unsupported(f"{call.name}{tuple(given)}", call.mark)
    return sizes


def as_other(call: Call) -> Any:
    """`x.view_as(logits)` and the like: the other's sizes are those of the whole."""
    x, other = call.args[0], call.args[1] if len(call.args) > 1 else call.kwargs["other"]
    function = {"view_as": "view", "reshape_as": "reshape", "expand_as": "expand"}[call.name]
    sizes = tuple(whole_sizes(other))
    mark = mark_of(x)
    if mark is None:
        return getattr(x, function)(sizes)
    changed = Call(getattr(Tensor, function), function, (x, sizes), {}, x, mark, call.by_script)
    return expand(changed) if function == "expand" else view(changed)


def broadcast(call: Call) -> Any:
    """Of logits and others that go along their rows; these get as many columns as the whole vocabulary has."""
    tensors = call.args[0] if len(call.args) == 1 and isinstance(call.args[0], tuple | list) else call.args
    shape = torch.broadcast_shapes(*[whole_sizes(tensor) for tensor in tensors])
    behind = call.logits.ndim - call.mark.dim
    local = [*shape[: len(shape) - behind], call.mark.shard.local, *shape[len(shape) - behind + 1 :]]
    mark = call.mark._replace(dim=len(shape) - behind)
    if shape[-behind] != call.mark.shard.size:
        raise unsupported(call.name, call.mark)
    return tuple(
        hand_on(tensor.expand(local), mark) if is_marked(tensor) else tensor.expand(shape) for tensor in tensors
    )


def reorder(call: Call) -> Tensor:
    # A tensor whose every dim has its own length tells where the vocabulary goes.
    logits, mark, others = call.logits, call.mark, call.args[1:]
    moved = call.func(torch.empty(tuple(range(2, logits.ndim + 2)), device="meta"), *others, **call.kwargs)
    return hand_on(call.run(), mark._replace(dim=moved.shape.index(2 + mark.dim)))  # type: ignore[no-any-return]


def merge(call: Call) -> Tensor:
    """flatten and unflatten of other dims than the vocabulary, which was and stays last."""
    logits, mark = call.logits, call.mark
    if mark.dim != logits.ndim - 1:
        raise unsupported(f"{call.name} while the vocabulary is not the last dim", mark)
    result = call.run()
    if result.shape[-1] != mark.shard.local:
        raise unsupported("a reshape that merges the vocabulary with other dims", mark)
    return hand_on_last(result, mark)


def squeeze(call: Call) -> Tensor:
    logits, mark = call.logits, call.mark
    if mark.dim != logits.ndim - 1:
        raise unsupported("squeeze while the vocabulary is not the last dim", mark)
    given = call.kwargs.get("dim", call.args[1:] or range(logits.ndim - 1))
    dims = given[0] if isinstance(given, tuple) and len(given) == 1 else given
    several = [dims] if isinstance(dims, int) else dims
    return hand_on_last(logits.squeeze([dim for dim in several if dim % logits.ndim != mark.dim]), mark)


def keep(call: Call) -> Any:
    return hand_on(call.run(), call.mark)


def rows_at(call: Call) -> Tensor:
    """`logits[index]` with an index that leaves the vocabulary, the last dim, whole."""
    logits, mark, index = call.args[0], call.mark, call.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    if logits is not call.logits or any(map(is_marked, items)):
        raise unsupported("indexing by what holds this rank's columns", mark)
    if mark.dim != logits.ndim - 1:
        raise unsupported("indexing while the vocabulary is not the last dim", mark)
    place = vocabulary_item(items, logits.ndim)
    if place is not None:
        if not is_everything(items[place], mark.shard.size):
            raise unsupported("indexing the vocabulary", mark)
        items[place] = slice(None)
    return hand_on_last(logits[tuple(items)], mark)


def vocabulary_item(items: Sequence[Any], ndim: int) -> int | None:
    """Which item of an index is for the last dim; None where it is left whole."""
    dims = [
        item.ndim if isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8) and item.ndim else 1
        for item in items
        if item is not None and item is not Ellipsis
    ]
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    if not dims or (ellipses and ellipses[0] == len(items) - 1) or (not ellipses and sum(dims) < ndim):
        return None
    return max(place for place, item in enumerate(items) if item is not None and item is not Ellipsis)


def is_everything(item: Any, size: int) -> bool:
    return (
        isinstance(item, slice)
        and item.start in (None, 0)
        and (item.stop is None or item.stop == size)
        and item.step in (None, 1)
    )


def deal(call: Call) -> Any:
    place, mark, logits = DEAL_ROWS[call.name], call.mark, call.logits
    dim = call.kwargs.get("dim", call.args[place] if len(call.args) > place else 0) % logits.ndim
    if dim == mark.dim:
        raise unsupported(f"{call.name} over the vocabulary", mark)
    if call.name in ("unbind", "select"):
        mark = mark._replace(dim=mark.dim - (dim < mark.dim))
    return pytree.tree_map(lambda part: hand_on(part, mark), call.run())


def iterate(call: Call) -> Any:
    return iter(deal(call._replace(func=Tensor.unbind, name="unbind")))


def join(call: Call) -> Tensor:
    tensors: Sequence[Tensor] = call.args[0] if call.args else call.kwargs["tensors"]
    mark, is_stack = call.mark, call.name == "stack"
    given = call.kwargs.get("dim", call.kwargs.get("axis", call.args[1] if len(call.args) > 1 else 0))
    dim = given % (tensors[0].ndim + is_stack)
    if {mark_of(tensor) for tensor in tensors} != {mark}:
        raise unsupported(f"{call.name} of other tensors, or over the vocabulary,", mark)
    if dim == mark.dim and not is_stack:
        raise unsupported(f"{call.name} of other tensors, or over the vocabulary,", mark)
    return hand_on(call.run(), mark._replace(dim=mark.dim + 1) if is_stack and dim <= mark.dim else mark)  # type: ignore[no-any-return]


def elementwise(call: Call) -> Any:
    """Every dim stays where it is. Operands of the whole vocabulary take part with this rank's columns."""
    mark, logits, name = call.mark, call.logits, call.name
    if name in ("to", "type_as") and call.args[0] is not logits:  # which only say how
        return call.run()
    changes_first = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if changes_first and not is_marked(call.args[0]):
        raise unsupported(f"{name.strip('_')} into a tensor of all columns", mark)
    behind = logits.ndim - mark.dim

    def operand(value: Any) -> Any:
        if value is logits:
            return logits.float() if mark.promote else logits
        return columns_of(value, mark, behind)

    args = [operand(value) for value in call.args]
    result = call.func(*args, **{key: operand(value) for key, value in call.kwargs.items()})
    if isinstance(result, tuple):  # where(condition): places
        raise unsupported(f"{name} of a condition alone", mark)
    if not isinstance(result, Tensor):
        return result
    # Operands of more dims put theirs in front, so the vocabulary keeps its place counted from the back.
    marks = [(arg.ndim, known) for arg in [*args, *call.kwargs.values()] if (known := mark_of(arg)) is not None]
    if any(ndim - known.dim != behind for ndim, known in marks) or result.shape[-behind] != mark.shard.local:
        raise unsupported(
            "a function of logits whose vocabularies are in different dims, or of tensors that do not go with them,",
            mark,
        )
    return hand_on(result, mark._replace(dim=result.ndim - behind, promote=False))


def over_rows(call: Call) -> Any:
    """A function over another dim than the vocabulary, which is the last one."""
    mark, logits, args, kwargs = call.mark, call.logits, list(call.args), dict(call.kwargs)
    if mark.promote:
        args = [arg.float() if arg is logits else arg for arg in args]
    if not is_marked(args[0]):
        raise unsupported(f"{call.name} of another tensor", mark)
    if call.name in _ALIGNED:
        behind = logits.ndim - mark.dim
        args = [args[0], *[_aligned(value, mark, behind) for value in args[1:]]]
        kwargs = {key: _aligned(value, mark, behind) for key, value in kwargs.items()}
    result = call.func(*args, **kwargs)
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            if mark.dim != logits.ndim - 1 or not leaf.ndim or leaf.shape[-1] != mark.shard.local:
                raise unsupported(call.name, mark)
            hand_on_last(leaf, mark._replace(promote=False))
    return result


def _aligned(value: Any, mark: Mark, behind: int) -> Any:
    if isinstance(value, Tensor) and not is_marked(value) and value.shape[-behind] != mark.shard.size:
        raise unsupported("an index of some columns", mark)
    return columns_of(value, mark, behind)
