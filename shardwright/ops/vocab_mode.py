"""Bring the vocabulary-parallel loss to heads that compute `CrossEntropyLoss` inline.

A sharded head returns logits [..., V_local]; the unchanged forward of the model then calls `logits.view(-1, config.vocab_size)` and
`F.cross_entropy`. Inside `vocab_parallel_loss()` these two mean what their author meant:

    with vocab_parallel_loss():                 # around the forward of the model
        ...
        mark_vocab_sharded(logits, shard)       # in the sharded head, on its output
        ...
        loss = F.cross_entropy(logits.float().view(-1, V), labels)

Nothing is guessed from shapes. The head marks its output with the shard and the dim that holds the vocabulary; functions that move, slice
or rescale logits hand the mark on, so a hidden size that happens to equal V_local is never mistaken for a vocabulary. A function that mixes
the vocabulary (softmax, argmax, topk, ...) would be wrong on a shard, and what a function that is not known here does to it cannot be told:
both raise `SplitVocabularyError` instead. `whole_logits` gathers the columns for those who need all of them.

The mode is entered when a tensor is marked, not before: the layers below the head run without its overhead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_variadic

from ..comm.compat import get_base, without_torch_function
from ..utils import pytree
from .collective import gather_from_group
from .cross_entropy import vocab_cross_entropy
from .vocab_shard import VocabShard

_MARK = "_shardwright_vocab"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that keep every dim where it is. Scalars and unmarked tensors may take part.
_ELEMENTWISE = _names(
    """float half bfloat16 double to type type_as alias cpu cuda requires_grad_ add sub mul div neg tanh sigmoid clamp clip abs square sqrt
    exp log pow relu true_divide add_ sub_ mul_ div_ tanh_ clamp_ masked_fill masked_fill_ where nan_to_num dropout softplus __add__
    __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __pow__ __iadd__ __isub__ __imul__ __itruediv__
    zeros_like ones_like full_like empty_like isnan isinf isfinite"""
)
# Functions that make something of its own size; only dtype and device are the logits'.
_CREATORS = _names("""new_zeros new_ones new_empty new_full new_tensor""")
# The host sees this rank's columns alone.
_READ_BY_HOST = _names("""tolist numpy __array__ __reduce_ex__""")
# Functions that are wrong on a shard when their `dim` argument is the vocabulary.
_OVER_A_DIM = _names(
    """softmax log_softmax gumbel_softmax logsumexp argmax argmin topk sort argsort max min amax amin sum mean norm std var cumsum gather
    scatter index_select take_along_dim median mode kthvalue prod any all"""
)
# Functions that read the last dim as the features.
_WITH_FEATURES = _names(
    """nll_loss kl_div binary_cross_entropy_with_logits mse_loss multi_margin_loss layer_norm rms_norm normalize linear matmul mm bmm
    __matmul__"""
)


class SplitVocabularyError(ValueError):
    """Something needs all columns of logits, of which this rank holds some."""


class _Mark(NamedTuple):
    shard: VocabShard
    dim: int  # that holds the vocabulary, counted from the front
    promote: bool = False  # `.float()` was asked for; the loss computes in fp32 anyway, so the copy is made only if something else needs it


def mark_vocab_sharded(logits: Tensor, shard: VocabShard, dim: int = -1) -> Tensor:
    """Note that `logits` hold this rank's part of the vocabulary along `dim`; returns `logits`."""
    assert logits.shape[dim] == shard.local, f"{tuple(logits.shape)} does not hold {shard.local} columns along dim {dim}"
    setattr(logits, _MARK, _Mark(shard, dim % logits.ndim))
    if _scopes:
        _scopes[-1].enter()
    return logits


def vocab_shard_of(tensor: Tensor) -> VocabShard | None:
    """The shard that marked logits hold, or None for any other tensor."""
    mark = getattr(tensor, _MARK, None)
    return None if mark is None else mark.shard


def whole_logits(logits: Tensor) -> Tensor:
    """All columns of marked logits, without padding, on every rank of the group; any other tensor as it is. Collective.

    [..., V_local, ...] -> [..., V, ...]; backward hands every rank its own columns, the consumers being replicated.
    """
    mark: _Mark | None = getattr(logits, _MARK, None)
    if mark is None:
        return logits
    whole = gather_from_group(logits, mark.shard.group, mark.dim).narrow(mark.dim, 0, mark.shard.size)
    return whole.float() if mark.promote else whole


@contextmanager
def vocab_parallel_loss(*, marked: bool = False) -> Iterator[None]:
    """Around a model's forward: losses on marked logits are computed over the whole vocabulary.

    marked  the logits were marked before (a criterion on a model's outputs): the mode is entered at once
    """
    scope = _Scope()
    _scopes.append(scope)
    try:
        if marked:
            scope.enter()
        yield
    finally:
        scope.leave()
        _scopes.remove(scope)


class _Scope:
    def __init__(self) -> None:
        self._mode: _VocabMode | None = None

    def enter(self) -> None:
        if self._mode is None:
            self._mode = _VocabMode()
            self._mode.__enter__()

    def leave(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)


_scopes: list[_Scope] = []


class _VocabMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _on_marked(func, args, kwargs or {})


class ShardedLogits(Tensor):
    """Marked logits in the hands of a script, where no mode is entered: the same functions mean the same, or are refused."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with without_torch_function():
            return as_scripts_see(_on_marked(func, args, kwargs or {}))


def as_scripts_see(value: Any) -> Any:
    """`value`, as `ShardedLogits` where it is a marked tensor."""
    mark = getattr(value, _MARK, None)
    if mark is None or isinstance(value, ShardedLogits):
        return value
    return _hand_on(value.as_subclass(ShardedLogits), mark)


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, marked as `tensor` is."""
    return _hand_on(tensor.detach(), getattr(tensor, _MARK)) if hasattr(tensor, _MARK) else tensor.detach()


def concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Samples of several microbatches behind each other, marked as they are."""
    merged = torch.cat(list(tensors), dim)
    return _hand_on(merged, getattr(tensors[0], _MARK)) if hasattr(tensors[0], _MARK) else merged


def _on_marked(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)` with what it means where one of the arguments is marked."""
    logits = _first_marked((*args, *kwargs.values()))
    if logits is None:
        return func(*args, **kwargs)
    mark: _Mark = getattr(logits, _MARK)
    if func is F.cross_entropy:
        return sharded_cross_entropy(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name == "float" and logits.dtype in (torch.float16, torch.bfloat16):
        return _hand_on(logits.view_as(logits), mark._replace(promote=True))
    if name in ("view", "reshape"):
        return _view(func, mark, *args, **kwargs)
    if name in ("transpose", "permute", "swapaxes", "swapdims", "movedim"):
        return _reorder(func, mark, *args, **kwargs)
    if name == "__getitem__":
        return _getitem(mark, *args)
    if name == "__setitem__":
        _getitem(mark, *args[:2])
        return func(*args, **kwargs)
    if name in ("flatten", "squeeze", "unsqueeze"):
        return _hand_on_by_size(func(*args, **kwargs), mark)
    if name in ("contiguous", "detach", "clone") or getattr(func, "__self__", None) is Tensor.data:
        return _hand_on(func(*args, **kwargs), mark)
    if func == get_base:  # FSDP2 asks whether an output is a view
        return func(*args, **kwargs)
    if name in _WITH_FEATURES | _READ_BY_HOST or (name in _OVER_A_DIM and _runs_over(mark, logits.ndim, args, kwargs)):
        raise _unsupported(name.strip("_"), mark)
    if mark.promote and name in _ELEMENTWISE | _OVER_A_DIM:
        args = [arg.float() if arg is logits else arg for arg in args]
    if name in _ELEMENTWISE and mark.dim == logits.ndim - 1:  # BART adds a bias [1, V] behind its head
        args = [arg if arg is logits or not isinstance(arg, Tensor) or hasattr(arg, _MARK) else mark.shard.columns(arg) for arg in args]
    result = func(*args, **kwargs)
    mark = mark._replace(promote=False)
    if name in _ELEMENTWISE:
        return _hand_on(result, mark)
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and name not in _CREATORS:
            if name not in _OVER_A_DIM or mark.dim != logits.ndim - 1 or not leaf.ndim or leaf.shape[-1] != mark.shard.local:
                raise _unsupported(getattr(getattr(func, "__self__", func), "__name__", name), mark)
            _hand_on(leaf, mark._replace(dim=leaf.ndim - 1))
    return result


def _first_marked(values: Sequence[Any]) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            if hasattr(value, _MARK):
                return value
        elif isinstance(value, list | tuple):
            found = _first_marked(value)
            if found is not None:
                return found
    return None


def _hand_on(result: Any, mark: _Mark) -> Any:
    if isinstance(result, Tensor):
        setattr(result, _MARK, mark)
    return result


def _hand_on_by_size(result: Tensor, mark: _Mark) -> Tensor:
    """After a change of the leading dims: the vocabulary was and stays last."""
    if result.shape[-1] != mark.shard.local:
        raise _unsupported("a reshape that merges the vocabulary with other dims", mark)
    return _hand_on(result, mark._replace(dim=result.ndim - 1))


def _view(func: Callable[..., Tensor], mark: _Mark, logits: Tensor, *shape: Any) -> Tensor:
    """A view whose last size is the vocabulary's, full or local."""
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
    if mark.dim != logits.ndim - 1 or not sizes or not all(isinstance(size, int) for size in sizes):
        raise _unsupported(f"{func.__name__}{shape}", mark)
    if sizes[-1] == -1 and -1 not in sizes[:-1] and math.prod(sizes[:-1]):
        sizes[-1] = logits.numel() // math.prod(sizes[:-1])
    if sizes[-1] not in (mark.shard.size, mark.shard.local):
        raise _unsupported(f"{func.__name__}{shape}", mark)
    sizes[-1] = mark.shard.local
    return _hand_on(func(logits, sizes), mark._replace(dim=len(sizes) - 1))


def _reorder(func: Callable[..., Tensor], mark: _Mark, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # A tensor whose every dim has its own length tells where the vocabulary goes.
    moved = func(torch.empty(tuple(range(1, logits.ndim + 1)), device="meta"), *args, **kwargs)
    return _hand_on(func(logits, *args, **kwargs), mark._replace(dim=moved.shape.index(1 + mark.dim)))


def _getitem(mark: _Mark, logits: Tensor, index: Any) -> Tensor:
    """Indices that leave the vocabulary, the last dim, whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    if mark.dim != logits.ndim - 1:
        raise _unsupported("indexing while the vocabulary is not the last dim", mark)
    ellipses = [place for place, item in enumerate(items) if item is Ellipsis]
    consumed = sum(
        item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1
        for item in items
        if item is not None and item is not Ellipsis
    )
    if (ellipses and ellipses[0] != len(items) - 1) or consumed >= logits.ndim:
        last = items[-1]
        if (
            not isinstance(last, slice)
            or last.start not in (None, 0)
            or last.stop not in (None, mark.shard.size)
            or last.step not in (None, 1)
        ):
            raise _unsupported("indexing the vocabulary", mark)
        items[-1] = slice(None)
    result = logits[tuple(items)]
    return _hand_on(result, mark._replace(dim=result.ndim - 1))


def _runs_over(mark: _Mark, ndim: int, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    dim = kwargs.get("dim", kwargs.get("axis", next((arg for arg in args[1:] if isinstance(arg, (int, tuple, list))), None)))
    if dim is None:
        return True
    return any(one % ndim == mark.dim for one in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def sharded_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` with the signature of torch on marked logits [C], [N, C] or [N, C, d1, ...].

    Torch function modes outside of this one see it as a function of its own, as they would see `F.cross_entropy`.
    """
    if has_torch_function_variadic(input, target):
        arguments = (weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        result: Tensor = handle_torch_function(sharded_cross_entropy, (input, target), input, target, *arguments)
        return result
    mark: _Mark = getattr(input, _MARK)
    if weight is not None:
        raise _unsupported("cross_entropy(weight=...)", mark)
    if size_average is not None or reduce is not None:
        raise _unsupported("cross_entropy(size_average=..., reduce=...), deprecated in torch; reduction= works", mark)
    if target.is_floating_point():
        raise _unsupported("cross_entropy with class probabilities", mark)
    class_dim = 0 if input.ndim == 1 else 1
    if mark.dim != class_dim:
        raise _unsupported(f"cross_entropy over dim {class_dim} while the vocabulary is dim {mark.dim}", mark)
    flat = input.movedim(class_dim, -1).reshape(-1, mark.shard.local)
    loss = vocab_cross_entropy(
        flat, target.reshape(-1), mark.shard, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    return loss.view(target.shape) if reduction == "none" else loss


def _unsupported(what: str, mark: _Mark) -> SplitVocabularyError:
    return SplitVocabularyError(
        f"{what} is not possible on logits of which this rank holds {mark.shard.local} of {mark.shard.size} columns; "
        "gather them (gather_output=True or parallel_output=False), or use vocab_cross_entropy"
    )
