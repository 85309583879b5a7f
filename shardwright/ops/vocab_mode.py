"""Bring the vocabulary-parallel loss to heads that compute `CrossEntropyLoss` inline.

A sharded head returns logits [..., V_local]; the unchanged forward of the model then calls
`logits.view(-1, config.vocab_size)` and `F.cross_entropy`. Inside `vocab_parallel_loss()` these two mean what their
author meant:

    with vocab_parallel_loss():                 # around the forward of the model
        ...
        mark_vocab_sharded(logits, shard)       # in the sharded head, on its output
        ...
        loss = F.cross_entropy(logits.float().view(-1, V), labels)

Nothing is guessed from shapes. The head marks its output with the shard and the dim that holds the vocabulary;
functions that move, slice or rescale logits hand the mark on, so a hidden size that happens to equal V_local is never
mistaken for a vocabulary. A function that mixes the vocabulary (sort, kl_div, ...) would be wrong on a shard, and what
a function that is not known here does to it cannot be told: both raise `SplitVocabularyError` instead. `whole_logits`
gathers the columns for those who need all of them.

In the hands of a script the logits are `ShardedLogits`, and what scripts commonly read off them (argmax, topk,
log_softmax, gather, ...) is computed over the ranks (`ops.vocab_reads`). Inside the mode it is refused: there, those
who follow a loss must see what it is made of.

The mode is entered when a tensor is marked, not before: the layers below the head run without its overhead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_variadic

from ..comm.compat import get_base, without_torch_function
from ..utils import pytree
from . import vocab_reads
from .collective import gather_from_group
from .cross_entropy import vocab_cross_entropy
from .vocab_shard import VocabShard

_MARK = "_shardwright_vocab"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Functions that keep every dim where it is. Scalars and unmarked tensors may take part.
_ELEMENTWISE = _names(
    """float half bfloat16 double to type type_as alias cpu cuda requires_grad_ add sub mul div neg tanh sigmoid clamp
    clip abs square sqrt exp log pow relu true_divide add_ sub_ mul_ div_ tanh_ clamp_ masked_fill masked_fill_ where
    nan_to_num dropout softplus __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__
    __pow__ __iadd__ __isub__ __imul__ __itruediv__ zeros_like ones_like full_like empty_like isnan isinf isfinite eq ne
    gt ge lt le __eq__ __ne__ __gt__ __ge__ __lt__ __le__"""
)
# Functions that deal rows: their `dim` (first of the arguments at this place) must not be the vocabulary.
_DEAL_ROWS = {"chunk": 2, "split": 2, "split_with_sizes": 2, "tensor_split": 2, "narrow": 1, "unbind": 1, "select": 1}
_JOIN_ROWS = _names("cat concat concatenate stack")
# Functions that make something of its own size; only dtype and device are the logits'.
_CREATORS = _names("""new_zeros new_ones new_empty new_full new_tensor""")
# The host sees this rank's columns alone.
_READ_BY_HOST = _names(
    """tolist numpy __array__ __reduce_ex__ __dlpack__ item __bool__ __float__ __int__ __index__ equal allclose
    __contains__"""
)
# What has no tensor for a result and may be asked all the same: of this rank's columns (shape, numel) or of any tensor.
_FACTS = _names(
    """shape dtype device layout ndim size numel nelement dim ndimension stride storage_offset element_size itemsize
    nbytes data_ptr untyped_storage _version type get_device requires_grad is_leaf grad_fn grad names output_nr
    retains_grad is_contiguous is_complex is_floating_point is_signed is_inference is_pinned is_shared is_conj is_neg
    has_names is_coalesced is_same_size _is_view is_nested is_sparse is_sparse_csr is_quantized is_cuda is_cpu is_meta
    is_xpu is_mps is_mkldnn is_vulkan is_ipu is_maia is_xla is_hpu is_mtia backward register_hook retain_grad
    register_post_accumulate_grad_hook _backward_hooks _post_accumulate_grad_hooks __len__ __repr__ __str__ __format__
    __hash__ __dir__ __dlpack_device__ record_stream result_type can_cast"""
)
# Functions that are wrong on a shard when their `dim` argument is the vocabulary.
_OVER_A_DIM = _names(
    """softmax log_softmax gumbel_softmax logsumexp argmax argmin topk sort argsort max min amax amin sum mean norm std
    var cumsum gather scatter index_select take_along_dim median mode kthvalue prod any all"""
)
# How many arguments of theirs come before `dim`, where it is not the logits alone: k, the order, the settings of the
# noise.
_BEFORE_DIM = {"topk": 2, "kthvalue": 2, "norm": 2, "gumbel_softmax": 4}
# Functions that read the last dim as the features.
_WITH_FEATURES = _names(
    """nll_loss kl_div binary_cross_entropy_with_logits mse_loss multi_margin_loss layer_norm rms_norm normalize linear
    matmul mm bmm __matmul__"""
)


class SplitVocabularyError(ValueError):
    """Something needs all columns of logits, of which this rank holds some."""


class _Mark(NamedTuple):
    shard: VocabShard
    dim: int  # that holds the vocabulary, counted from the front
    # `.float()` was asked for; the loss computes in fp32 anyway, so the copy is made only if something else needs it
    promote: bool = False


def mark_vocab_sharded(logits: Tensor, shard: VocabShard, dim: int = -1) -> Tensor:
    """Note that `logits` hold this rank's part of the vocabulary along `dim`; returns `logits`."""
    assert logits.shape[dim] == shard.local, (
        f"{tuple(logits.shape)} does not hold {shard.local} columns along dim {dim}"
    )
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
    with without_torch_function():
        plain = logits.as_subclass(Tensor) if isinstance(logits, ShardedLogits) else logits
        whole = gather_from_group(plain, mark.shard.group, mark.dim).narrow(mark.dim, 0, mark.shard.size)
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


def in_forward() -> bool:
    """Whether a forward inside of `vocab_parallel_loss()` is running."""
    return bool(_scopes)


class _VocabMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _on_marked(func, args, kwargs or {})


class ShardedLogits(Tensor):
    """Marked logits in the hands of a script, where no mode is entered: the same functions mean the same, or are
    refused.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What it maps gets tensors without marks; that it looks at the dims of its arguments is all there is to see of
        # it.
        if func is Tensor.dim and sys._getframe(1).f_globals.get("__name__") == "torch._functorch.vmap":
            raise _unsupported("vmap", getattr(args[0], _MARK))
        with without_torch_function():
            return pytree.tree_map(as_scripts_see, _on_marked(func, args, kwargs or {}, by_script=True))


def as_scripts_see(value: Any) -> Any:
    """`value`, as `ShardedLogits` where it is a marked tensor."""
    mark = getattr(value, _MARK, None)
    if mark is None or isinstance(value, ShardedLogits):
        return value
    if mark.promote:  # the model asked for fp32, and a script may write to it
        value, mark = value.float(), mark._replace(promote=False)
    if type(value) is Tensor:  # itself, so that hooks see the gradient of what the model made of it
        value.__class__ = ShardedLogits
        return value
    return _hand_on(value.as_subclass(ShardedLogits), mark)


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, marked as `tensor` is."""
    return _hand_on(tensor.detach(), getattr(tensor, _MARK)) if hasattr(tensor, _MARK) else tensor.detach()


def concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Samples of several microbatches behind each other, marked as they are."""
    merged = torch.cat(list(tensors), dim)
    return _hand_on(merged, getattr(tensors[0], _MARK)) if hasattr(tensors[0], _MARK) else merged


def _on_marked(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], by_script: bool = False) -> Any:
    """`func(*args, **kwargs)` with what it means where one of the arguments is marked."""
    logits = _first_marked((*args, *kwargs.values()))
    if logits is None:
        return func(*args, **kwargs)
    mark: _Mark = getattr(logits, _MARK)
    if func is F.cross_entropy or func is sharded_cross_entropy:
        return sharded_cross_entropy(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name == "float" and not by_script and logits.dtype in (torch.float16, torch.bfloat16):
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
    if name == "unsqueeze":
        return _reorder(func, mark, *args, **kwargs)
    if name in ("flatten", "squeeze"):
        if mark.dim != logits.ndim - 1:
            raise _unsupported(f"{name} while the vocabulary is not the last dim", mark)
        return _hand_on_by_size(func(*args, **kwargs), mark)
    if name in ("contiguous", "detach", "clone") or any(
        getattr(func, "__self__", None) is held for held in (Tensor.data, Tensor.grad)
    ):
        return _hand_on(func(*args, **kwargs), mark)
    if func == get_base:  # FSDP2 asks whether an output is a view
        return func(*args, **kwargs)
    if name == "__iter__":
        return iter(_deal_rows(Tensor.unbind, "unbind", mark, *args))
    if name in _DEAL_ROWS:
        return _deal_rows(func, name, mark, *args, **kwargs)
    if name in _JOIN_ROWS:
        return _join_rows(func, name, mark, *args, **kwargs)
    if by_script and name in READS and args and args[0] is logits and _runs_over(mark, logits.ndim, args, kwargs, name):
        return _read(name, mark, *args, **kwargs)
    if name in _WITH_FEATURES | _READ_BY_HOST or (
        name in _OVER_A_DIM and _runs_over(mark, logits.ndim, args, kwargs, name)
    ):
        raise _unsupported(name.strip("_"), mark)
    if mark.promote and name in _ELEMENTWISE | _OVER_A_DIM:
        args = [arg.float() if arg is logits else arg for arg in args]
    if name in _ELEMENTWISE and mark.dim == logits.ndim - 1:  # BART adds a bias [1, V] behind its head
        args = [
            arg if arg is logits or not isinstance(arg, Tensor) or hasattr(arg, _MARK) else mark.shard.columns(arg)
            for arg in args
        ]
    if name in ("to", "type_as") and args[0] is not logits:  # which only say how
        return func(*args, **kwargs)
    result = func(*args, **kwargs)
    mark = mark._replace(promote=False)
    if name in _ELEMENTWISE:
        return _hand_on_broadcast(result, mark, logits.ndim, args)
    asked = getattr(getattr(func, "__self__", func), "__name__", name)  # of a property, its name
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    if by_script and not tensors and name not in ("__set__", "__delete__") and asked not in _FACTS:
        raise _unsupported(asked.strip("_"), mark)
    for leaf in tensors:
        if name not in _CREATORS:
            if (
                name not in _OVER_A_DIM
                or mark.dim != logits.ndim - 1
                or not leaf.ndim
                or leaf.shape[-1] != mark.shard.local
            ):
                raise _unsupported(asked, mark)
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


def _hand_on_broadcast(result: Any, mark: _Mark, ndim: int, args: Sequence[Any]) -> Any:
    """Operands of more dims put theirs in front, so the vocabulary keeps its place counted from the back."""
    if not isinstance(result, Tensor):
        return result
    behind = ndim - mark.dim
    others = (arg for arg in args if isinstance(arg, Tensor) and hasattr(arg, _MARK))
    if any(arg.ndim - getattr(arg, _MARK).dim != behind for arg in others) or result.shape[-behind] != mark.shard.local:
        raise _unsupported(
            "a function of logits whose vocabularies are in different dims, or of tensors that do not go with them,",
            mark,
        )
    return _hand_on(result, mark._replace(dim=result.ndim - behind))


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
    moved = func(torch.empty(tuple(range(2, logits.ndim + 2)), device="meta"), *args, **kwargs)
    return _hand_on(func(logits, *args, **kwargs), mark._replace(dim=moved.shape.index(2 + mark.dim)))


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


def _deal_rows(func: Callable[..., Any], name: str, mark: _Mark, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
    place = _DEAL_ROWS[name] - 1
    dim = kwargs.get("dim", args[place] if len(args) > place else 0) % logits.ndim
    if dim == mark.dim:
        raise _unsupported(f"{name} over the vocabulary", mark)
    if name in ("unbind", "select"):
        mark = mark._replace(dim=mark.dim - (dim < mark.dim))
    return pytree.tree_map(lambda part: _hand_on(part, mark), func(logits, *args, **kwargs))


def _join_rows(
    func: Callable[..., Tensor], name: str, mark: _Mark, tensors: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Tensor:
    marks = {getattr(tensor, _MARK, None) for tensor in tensors}
    given = kwargs.get("dim", kwargs.get("axis", args[0] if args else 0))
    dim = given % (tensors[0].ndim + (name == "stack"))
    if marks != {mark} or kwargs.get("out") is not None or (dim == mark.dim and name != "stack"):
        raise _unsupported(f"{name} of other tensors, or over the vocabulary,", mark)
    joined = func(tensors, *args, **kwargs)
    return _hand_on(joined, mark._replace(dim=mark.dim + 1) if name == "stack" and dim <= mark.dim else mark)


def _read(name: str, mark: _Mark, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A function over the vocabulary, computed over the ranks."""
    kwargs.pop("_stacklevel", None)
    dim, promoted = mark.dim, logits.float() if mark.promote else logits
    plain = mark._replace(promote=False)
    if name in ("log_softmax", "softmax", "special_log_softmax", "special_softmax"):
        if kwargs.get("dim", args[0] if args else None) is None:
            raise _unsupported(f"{name} without dim", mark)
        dtype = kwargs.get("dtype", next((arg for arg in args if isinstance(arg, torch.dtype)), None))
        function = vocab_reads.softmax if name.endswith("softmax") and "log" not in name else vocab_reads.log_softmax
        return _hand_on(function(promoted, mark.shard, dim, dtype), plain)
    given = {**dict(zip(_ARGUMENTS[name], args, strict=False)), **kwargs}
    given["dim"] = given.pop("axis", given.get("dim"))
    keepdim = bool(given.get("keepdim", False))
    if not isinstance(given["dim"], int | tuple | list) and not (
        given["dim"] is None and name in ("sum", "mean", "any", "all", "topk")
    ):
        raise _unsupported(f"{name} without dim", mark)
    if name == "gather":
        return vocab_reads.gather(promoted, mark.shard, dim, given["index"])
    if name == "logsumexp":
        if not _is_only(given["dim"]):
            raise _unsupported(f"{name} over several dims", mark)
        return vocab_reads.logsumexp(promoted, mark.shard, dim, keepdim)
    if name == "topk":
        largest = bool(given.get("largest", True))
        found = vocab_reads.topk(promoted, mark.shard, dim, given["k"], largest)
        return torch.return_types.topk(found)  # type: ignore[attr-defined]
    if name in ("sum", "mean", "any", "all"):
        several = given["dim"] if isinstance(given["dim"], tuple | list) else (given["dim"],)
        dims = (
            tuple(range(logits.ndim))
            if given["dim"] is None or not several
            else tuple(one % logits.ndim for one in several)
        )
        if name == "mean" and not (given.get("dtype") or promoted.dtype).is_floating_point:
            raise RuntimeError(
                f"mean(): the input dtype must be a floating point dtype, not {promoted.dtype}; use .float().mean()"
            )
        if name in ("any", "all"):  # how many are true, or are not
            counted = promoted != 0 if name == "any" else promoted == 0
            number = vocab_reads.total(counted, mark.shard, dims, keepdim, None, dim)
            return number > 0 if name == "any" else number == 0
        result = vocab_reads.total(promoted, mark.shard, dims, keepdim, given.get("dtype"), dim)
        rows = math.prod(logits.shape[one] for one in dims if one != dim)
        return result if name == "sum" else result / (rows * mark.shard.size)
    if not _is_only(given["dim"]):
        raise _unsupported(f"{name} over several dims", mark)
    values, ids = vocab_reads.best(promoted, mark.shard, dim, name in ("argmax", "max", "amax"), keepdim)
    if name in ("max", "min"):
        return getattr(torch.return_types, name)((values, ids))
    return ids if name.startswith("arg") else values


# What scripts read off logits, and the order of the arguments after the logits.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "gather": ("dim", "index"),
    "logsumexp": ("dim", "keepdim"),
    "topk": ("k", "dim", "largest", "sorted"),
    "sum": ("dim", "keepdim"),
    "mean": ("dim", "keepdim"),
    **dict.fromkeys(("argmax", "argmin", "max", "min", "amax", "amin", "any", "all"), ("dim", "keepdim")),
}
READS = frozenset(_ARGUMENTS) | _names("log_softmax softmax special_log_softmax special_softmax")


def _is_only(dim: Any) -> bool:
    return isinstance(dim, int) or len(dim) == 1


def _runs_over(mark: _Mark, ndim: int, args: Sequence[Any], kwargs: dict[str, Any], name: str = "") -> bool:
    given = [
        arg
        for arg in args[_BEFORE_DIM.get(name, 1) :]
        if isinstance(arg, int | tuple | list) and not isinstance(arg, bool)
    ]
    dim = kwargs.get("dim", kwargs.get("axis", given[0] if given else None))
    if dim is None:
        return name != "topk" or mark.dim == ndim - 1
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
        flat,
        target.reshape(-1),
        mark.shard,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss.view(target.shape) if reduction == "none" else loss


def _unsupported(what: str, mark: _Mark) -> SplitVocabularyError:
    return SplitVocabularyError(
        f"{what} is not possible on logits of which this rank holds {mark.shard.local} of {mark.shard.size} columns; "
        "gather them on all ranks of the group (shardformer.layer.whole_logits(logits), or parallel_output=False for "
        "all outputs), or use vocab_cross_entropy"
    )
