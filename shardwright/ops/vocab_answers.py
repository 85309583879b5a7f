"""What scripts ask of logits whose vocabulary is split: functions over the vocabulary, with the arguments that torch
has for them, computed over the ranks.

Most need no more than a few numbers per row from every rank (`vocab_reads`). Those that order, draw or accumulate
(`sort`, `multinomial`, `cumsum`) get whole rows: they are gathered for the call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..utils import pytree
from . import vocab_reads
from .vocab_mark import (
    Call,
    Mark,
    columns_of,
    gathered,
    hand_on,
    is_marked,
    mark_of,
    names,
    unsupported,
    whole_sizes,
)
from .vocab_rows import elementwise, is_everything, rows_at, vocabulary_item


class Asked(NamedTuple):
    """`name(x, **given)` over dims of which one is the vocabulary; `dims` is None where the script named none."""

    name: str
    x: Tensor
    mark: Mark
    given: dict[str, Any]
    dims: tuple[int, ...] | None

    @property
    def keepdim(self) -> bool:
        return bool(self.given.get("keepdim", False))

    @property
    def is_only(self) -> bool:
        """Over the vocabulary alone."""
        return self.dims == (self.mark.dim,)

    @property
    def all_dims(self) -> tuple[int, ...]:
        return tuple(range(self.x.ndim)) if not self.dims else self.dims


def _softmax(asked: Asked) -> Tensor:
    if asked.dims is None:
        raise unsupported(f"{asked.name} without dim", asked.mark)
    function = vocab_reads.log_softmax if "log" in asked.name else vocab_reads.softmax
    result = function(asked.x, asked.mark.shard, asked.mark.dim, asked.given.get("dtype"))
    return hand_on(result, asked.mark)  # type: ignore[no-any-return]


def _gather(asked: Asked) -> Tensor:
    index = asked.given.get("index", asked.given.get("indices"))
    if not isinstance(index, Tensor) or asked.dims is None:
        raise unsupported(f"{asked.name} without dim", asked.mark)
    if asked.name == "take_along_dim":  # of which torch makes as many rows as there are
        index = index.expand([index.shape[d] if d == asked.mark.dim else size for d, size in enumerate(asked.x.shape)])
    return vocab_reads.gather(asked.x, asked.mark.shard, asked.mark.dim, index)


def _logsumexp(asked: Asked) -> Tensor:
    if asked.is_only:
        return vocab_reads.logsumexp(asked.x, asked.mark.shard, asked.mark.dim, asked.keepdim)
    rows = vocab_reads.logsumexp(asked.x, asked.mark.shard, asked.mark.dim, keepdim=True)
    return torch.logsumexp(rows, asked.all_dims, asked.keepdim)


def _topk(asked: Asked) -> Any:
    largest = bool(asked.given.get("largest", True))
    found = vocab_reads.topk(asked.x, asked.mark.shard, asked.mark.dim, asked.given["k"], largest)
    return torch.return_types.topk(found)  # type: ignore[attr-defined]


def _total(asked: Asked) -> Tensor:
    x, shard, dims = asked.x, asked.mark.shard, asked.all_dims
    dtype = asked.given.get("dtype")
    if asked.name in ("any", "all"):  # how many are true, or are not
        counted = x != 0 if asked.name == "any" else x == 0
        number = vocab_reads.total(counted, shard, dims, asked.keepdim, None, asked.mark.dim)
        return number > 0 if asked.name == "any" else number == 0
    if asked.name == "mean" and not (dtype or x.dtype).is_floating_point:
        raise RuntimeError(
            f"mean(): the input dtype must be a floating point dtype, not {x.dtype}; use .float().mean()"
        )
    result = vocab_reads.total(x, shard, dims, asked.keepdim, dtype, asked.mark.dim)
    if asked.name == "sum":
        return result
    return result / (math.prod(x.shape[dim] for dim in dims if dim != asked.mark.dim) * shard.size)


def _best(asked: Asked) -> Any:
    """The largest or smallest, and where it is."""
    name, x, mark = asked.name, asked.x, asked.mark
    largest = name in ("argmax", "max", "amax")
    if asked.is_only:
        values, ids = vocab_reads.best(x, mark.shard, mark.dim, largest, asked.keepdim)
        if name in ("max", "min"):
            return getattr(torch.return_types, name)((values, ids))
        return ids if name.startswith("arg") else values
    values, ids = vocab_reads.best(x, mark.shard, mark.dim, largest, keepdim=True)
    if name in ("amax", "amin"):
        return getattr(torch, name)(values, asked.all_dims, asked.keepdim)
    if name in ("max", "min"):
        return getattr(torch, name)(values)
    if mark.dim != x.ndim - 1 or asked.keepdim:
        raise unsupported(f"{name} without dim", mark)
    row = getattr(torch, name)(values)  # of the flattened tensor
    return row * mark.shard.size + ids.flatten()[row]


# What scripts ask, the order of the arguments after the logits, and who answers.
_ANSWERS: dict[str, tuple[tuple[str, ...], Callable[[Asked], Any]]] = {
    "gather": (("dim", "index"), _gather),
    "take_along_dim": (("indices", "dim"), _gather),
    "logsumexp": (("dim", "keepdim"), _logsumexp),
    "topk": (("k", "dim", "largest", "sorted"), _topk),
    **dict.fromkeys(("sum", "mean", "any", "all"), (("dim", "keepdim"), _total)),
    **dict.fromkeys(("argmax", "argmin", "max", "min", "amax", "amin"), (("dim", "keepdim"), _best)),
    **dict.fromkeys(("softmax", "log_softmax"), (("dim", "_stacklevel", "dtype"), _softmax)),
    **dict.fromkeys(("special_softmax", "special_log_softmax"), (("dim", "dtype"), _softmax)),
}
READS = frozenset(_ANSWERS)
# Functions of whole rows.
GATHERED = names("sort argsort msort multinomial cumsum std var median mode kthvalue norm prod")


def answer(call: Call) -> Any:
    """A function over the vocabulary, which is among the dims that it runs over."""
    mark, x = call.mark._replace(promote=False), call.logits.float() if call.mark.promote else call.logits
    names, function = _ANSWERS[call.name]
    given = {**_named(call, names), **call.kwargs}
    dim = given.pop("axis", given.get("dim"))
    if isinstance(dim, Tensor) or (call.name in ("max", "min") and "other" in given):
        raise unsupported(f"{call.name} without dim", mark)
    several: tuple[int, ...] | None = None if dim is None else tuple(dim) if isinstance(dim, tuple | list) else (dim,)
    return function(Asked(call.name, x, mark, given, several and tuple(one % x.ndim for one in several)))


def _named(call: Call, names: tuple[str, ...]) -> dict[str, Any]:
    values = call.args[1:]
    if call.name.endswith("softmax") and len(values) > 1 and isinstance(values[1], torch.dtype):
        names = ("dim", "dtype")  # Tensor.softmax, where functional.softmax has a third
    return dict(zip(names, values, strict=False))


def of_whole_rows(call: Call) -> Any:
    """`call` on the gathered logits."""
    args, kwargs = pytree.tree_map(gathered, (tuple(call.args), call.kwargs))
    return call.func(*args, **kwargs)


def nll_loss(call: Call) -> Tensor:
    """F.nll_loss of log-probabilities [C], [N, C] or [N, C, d1, ...]."""
    given = _bound(call)
    x, target, weight, mark = given["input"], given["target"], given["weight"], call.mark
    dim = 0 if x.ndim == 1 else 1
    if x is not call.logits or mark.dim != dim:
        raise unsupported(f"nll_loss over dim {dim} while the vocabulary is dim {mark.dim}", mark)
    ignored = target == given["ignore_index"]
    index = target.masked_fill(ignored, 0)
    shares = torch.ones_like(target, dtype=x.dtype) if weight is None else weight.to(x.dtype)[index]
    shares = shares.masked_fill(ignored, 0)
    losses = -vocab_reads.gather(x, mark.shard, dim, index.unsqueeze(dim)).squeeze(dim).masked_fill(ignored, 0) * shares
    return losses if given["reduction"] == "none" else _reduced(losses, given["reduction"], shares)


def _reduced(losses: Tensor, reduction: str, shares: Tensor) -> Tensor:
    return losses.sum() if reduction == "sum" else losses.sum() / shares.sum()


def loss_by_column(call: Call) -> Tensor:
    """A loss that compares two tensors column by column: kl_div, mse_loss and the like."""
    given, mark = _bound(call), call.mark
    reduction = given.pop("reduction")
    weight = given.get("weight")
    if weight is not None and call.name != "binary_cross_entropy_with_logits":
        raise unsupported(f"{call.name}(weight=...)", mark)

    def pointwise(*_: Any) -> Tensor:
        first, target = (columns_of(given[name], mark, call.logits.ndim - mark.dim) for name in ("input", "target"))
        others = {name: columns_of(value, mark, 1) for name, value in given.items() if name not in ("input", "target")}
        return call.func(first, target, **others, reduction="none")  # type: ignore[no-any-return]

    operands = (given["input"], given["target"])
    losses = elementwise(call._replace(func=pointwise, name=call.name, args=operands, kwargs={}))
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    known, sizes = mark_of(losses), whole_sizes(losses)
    assert known is not None
    total = vocab_reads.total(losses, mark.shard, tuple(range(losses.ndim)), False, None, known.dim)
    divisors = {"sum": 1, "mean": math.prod(sizes), "batchmean": sizes[0]}
    if reduction not in divisors or (reduction == "batchmean" and call.name != "kl_div"):
        raise ValueError(f"{call.name}: reduction={reduction!r} must be one of none, mean, sum")
    return total / divisors[reduction]


BY_COLUMN = names("kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy_with_logits")


def _bound(call: Call) -> dict[str, Any]:
    bound = inspect.signature(call.func).bind(*call.args, **call.kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise unsupported(
            f"{call.name}(size_average=..., reduce=...), deprecated in torch; reduction= works", call.mark
        )
    given.pop("reduce", None)
    return given


def item_at(call: Call) -> Any:
    """`logits[index]`: rows, whose columns stay where they are, or single columns, on every rank."""
    logits, mark, index = call.args[0], call.mark, call.args[1]
    items = list(index) if isinstance(index, tuple) else [index]
    place = vocabulary_item(items, logits.ndim)
    if logits is not call.logits or any(map(is_marked, items)) or mark.dim != logits.ndim - 1 or place is None:
        return rows_at(call)
    item, shard = items[place], mark.shard
    if is_everything(item, shard.size) or (isinstance(item, Tensor) and item.dtype == torch.bool and item.ndim > 1):
        return rows_at(call)
    if isinstance(item, slice) or (isinstance(item, Tensor) and item.dtype == torch.bool):
        ids = torch.arange(shard.size, device=logits.device)[item]
        rows = rows_at(call._replace(args=(logits, (*items[:place], slice(None), *items[place + 1 :]))))
        return _columns_at(rows, mark, (..., ids))
    return _columns_at(logits, mark, tuple(items))


def _columns_at(logits: Tensor, mark: Mark, items: tuple[Any, ...]) -> Tensor:
    """`whole[items]`, of which the last that is not None says which ids."""
    shard = mark.shard
    x = logits.float() if mark.promote else logits
    owned = torch.zeros(shard.size, dtype=torch.bool, device=x.device)
    owned[shard.start : shard.start + shard.length] = True
    mine = owned.expand(*x.shape[:-1], shard.size)[items]  # raises for ids that there are not
    place = vocabulary_item(items, x.ndim)
    assert place is not None
    wanted = items[place]
    local: int | Tensor
    if isinstance(wanted, int):
        local = min(max(wanted % shard.size - shard.start, 0), shard.local - 1)
    else:
        local = (torch.as_tensor(wanted, device=x.device) % shard.size - shard.start).clamp(0, shard.local - 1)
    found = x[(*items[:place], local, *items[place + 1 :])]
    return vocab_reads.summed(found.masked_fill(~mine, 0), shard)


def set_item(call: Call) -> Any:
    """`logits[index] = value` for rows; for a mask of the logits' shape, or single columns, of a number."""
    logits, index, value = call.args[0], call.args[1], call.args[2]
    mark = call.mark
    if logits is not call.logits:
        raise unsupported("writing them, or by them, into another tensor", mark)
    is_number = not isinstance(value, Tensor) or not value.ndim
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim == logits.ndim
    if is_mask and call.by_script and is_number:
        return call.func(logits, columns_of(index, mark, logits.ndim - mark.dim), value)
    items = list(index) if isinstance(index, tuple) else [index]
    place = vocabulary_item(items, logits.ndim)
    is_last, leading = mark.dim == logits.ndim - 1, items[:place]
    if place is None or is_everything(items[place], mark.shard.size) or not (is_last and is_number and call.by_script):
        rows_at(call)  # refuses what it must
        if place is not None:
            items[place] = slice(None)
        return call.func(logits, tuple(items), columns_of(value, mark, 1))
    if not all(isinstance(item, int | slice) or item is Ellipsis for item in leading) or is_marked(items[place]):
        raise unsupported("writing to single columns of chosen rows", mark)
    chosen = torch.zeros(mark.shard.size, dtype=torch.bool, device=logits.device)
    chosen[torch.as_tensor(items[place]) if isinstance(items[place], list | range) else items[place]] = True
    start, length = mark.shard.start, mark.shard.length
    return call.func(logits, (*leading, chosen[start : start + length].nonzero().squeeze(1)), value)
