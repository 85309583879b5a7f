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

To Python marked logits are the whole [..., V]: their sizes are the whole vocabulary's, operands are as wide as it is,
and one as wide as this rank's columns is refused. Only the memory is this rank's.

In the hands of a script the logits are `ShardedLogits`, and what scripts commonly read off them (argmax, topk,
log_softmax, gather, ...) is computed over the ranks (`ops.vocab_answers`). Inside the mode it is refused: there, those
who follow a loss must see what it is made of.

The mode is entered when a tensor is marked, not before: the layers below the head run without its overhead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_variadic

from ..comm.compat import without_torch_function
from ..kernels.lazy_logits import LazyLogits, check_use, fused_loss
from ..utils import pytree
from . import vocab_answers, vocab_rows
from .cross_entropy import vocab_cross_entropy
from .vocab_mark import (
    Call,
    Mark,
    SplitVocabularyError,
    first_marked,
    gathered,
    hand_on,
    mark_of,
    names,
    unsupported,
    whole_numel,
    whole_sizes,
)
from .vocab_shard import VocabShard

__all__ = [
    "ShardedLogits",
    "SplitVocabularyError",
    "as_scripts_see",
    "concatenated",
    "detached",
    "in_forward",
    "mark_vocab_sharded",
    "sharded_cross_entropy",
    "view_of",
    "vocab_parallel_loss",
    "vocab_shard_of",
    "whole_logits",
]


# Functions that keep every dim where it is. Scalars and unmarked tensors may take part.
_ELEMENTWISE = names(
    """float half bfloat16 double to type type_as alias cpu cuda requires_grad_ add sub mul div neg tanh sigmoid clamp
    clip abs square sqrt exp log pow relu true_divide add_ sub_ mul_ div_ tanh_ clamp_ masked_fill masked_fill_ where
    nan_to_num dropout softplus __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__
    __rdiv__ __pow__ __iadd__ __isub__ __imul__ __itruediv__ zeros_like ones_like full_like empty_like isnan isinf
    isfinite eq ne gt ge lt le __eq__ __ne__ __gt__ __ge__ __lt__ __le__ __rpow__ __abs__ __invert__ __and__ __or__
    __xor__ __rand__ __ror__ rsub multiply subtract divide negative absolute exp2 expm1 log2 log10 log1p rsqrt
    reciprocal sign round floor ceil trunc sin cos erf silu gelu elu selu leaky_relu logsigmoid hardtanh threshold
    minimum maximum fmax fmin clamp_min clamp_max clamp_min_ clamp_max_ logaddexp lerp addcmul addcdiv xlogy fmod
    remainder logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or greater greater_equal
    less less_equal not_equal isclose isneginf isposinf bool int long short zero_ fill_ neg_ exp_ log_ sqrt_ relu_
    sigmoid_ square_ nan_to_num_ special_entr special_xlogy special_expit special_log1p special_expm1 positive __pos__
    float_power"""
)
# Functions that make something of its own size; only dtype and device are the logits'.
_CREATORS = names("""new_zeros new_ones new_empty new_full new_tensor""")
# The host sees this rank's columns alone.
_READ_BY_HOST = names(
    """tolist numpy __array__ __reduce_ex__ __dlpack__ item __bool__ __float__ __int__ __index__ equal allclose
    __contains__"""
)
# What has no tensor for a result and may be asked all the same: of the memory, which is this rank's, or of any tensor.
_FACTS = names(
    """dtype device layout ndim dim ndimension stride storage_offset element_size itemsize nbytes
    _version type get_device requires_grad is_leaf grad_fn names output_nr retains_grad is_contiguous
    is_complex is_floating_point is_signed is_inference is_pinned is_shared is_conj is_neg has_names is_coalesced
    _is_view is_nested is_sparse is_sparse_csr is_quantized is_cuda is_cpu is_meta is_xpu is_mps is_mkldnn is_vulkan
    is_ipu is_maia is_xla is_hpu is_mtia backward register_hook retain_grad register_post_accumulate_grad_hook
    _backward_hooks _post_accumulate_grad_hooks __repr__ __str__ __format__ __hash__ __dir__ __dlpack_device__
    record_stream result_type can_cast _base"""
)
# Functions that are wrong on a shard when their `dim` argument is the vocabulary.
_OVER_A_DIM = vocab_answers.READS | vocab_answers.GATHERED | names("gumbel_softmax scatter index_select")
# How many arguments of theirs come before `dim`, where it is not the logits alone: k, the order, the settings of the
# noise.
_BEFORE_DIM = {"topk": 2, "kthvalue": 2, "norm": 2, "gumbel_softmax": 4}
# Functions that read the last dim as the features.
_WITH_FEATURES = names("""multi_margin_loss layer_norm rms_norm normalize linear matmul mm bmm __matmul__""")


def mark_vocab_sharded(logits: Tensor, shard: VocabShard, dim: int = -1) -> Tensor:
    """Note that `logits` hold this rank's part of the vocabulary along `dim`; returns `logits`."""
    assert logits.shape[dim] == shard.local, (
        f"{tuple(logits.shape)} does not hold {shard.local} columns along dim {dim}"
    )
    hand_on(logits, Mark(shard, dim % logits.ndim))
    if _scopes:
        _scopes[-1].enter()
    return logits


def vocab_shard_of(tensor: Tensor) -> VocabShard | None:
    """The shard that marked logits hold, or None for any other tensor."""
    mark = mark_of(tensor)
    return None if mark is None else mark.shard


def whole_logits(logits: Tensor) -> Tensor:
    """All columns of marked logits, without padding, on every rank of the group; any other tensor as it is. Collective.

    [..., V_local, ...] -> [..., V, ...]; backward hands every rank its own columns, the consumers being replicated.
    """
    with without_torch_function():
        return gathered(logits)  # type: ignore[no-any-return]


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
            mark = mark_of(args[0])
            assert mark is not None
            raise unsupported("vmap", mark)
        with without_torch_function():
            return pytree.tree_map(as_scripts_see, _on_marked(func, args, kwargs or {}, by_script=True))


class LazyShardedLogits(LazyLogits, ShardedLogits):
    """The same, of logits that nobody has read yet."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_use(func, args, kwargs or {})
        return ShardedLogits.__torch_function__(func, types, args, kwargs)


def as_scripts_see(value: Any) -> Any:
    """`value`, as `ShardedLogits` where it is a marked tensor."""
    mark = mark_of(value)
    if mark is None or isinstance(value, ShardedLogits):
        return value
    if mark.promote:  # the model asked for fp32, and a script may write to it
        mark = mark._replace(promote=False)
        value = hand_on(value.float(), mark)
    if isinstance(value, LazyLogits):
        value.__class__ = LazyShardedLogits
        return value
    if type(value) is Tensor:  # itself, so that hooks see the gradient of what the model made of it
        value.__class__ = ShardedLogits
        return value
    return hand_on(value.as_subclass(ShardedLogits), mark)


def view_of(tensor: Tensor) -> Tensor:
    """All of `tensor`, marked as it is, with a gradient of its own."""
    mark = mark_of(tensor)
    with without_torch_function():
        view = tensor.view_as(tensor)
    return view if mark is None else hand_on(view, mark)  # type: ignore[no-any-return]


def detached(tensor: Tensor) -> Tensor:
    """`tensor.detach()`, marked as `tensor` is."""
    mark = mark_of(tensor)
    return tensor.detach() if mark is None else hand_on(tensor.detach(), mark)  # type: ignore[no-any-return]


def concatenated(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Samples of several microbatches behind each other, marked as they are."""
    merged, mark = torch.cat(list(tensors), dim), mark_of(tensors[0])
    return merged if mark is None else hand_on(merged, mark)  # type: ignore[no-any-return]


def _on_marked(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], by_script: bool = False) -> Any:
    """`func(*args, **kwargs)` with what it means where one of the arguments is marked."""
    logits = first_marked((*args, *kwargs.values()))
    if logits is None:
        return func(*args, **kwargs)
    mark = mark_of(logits)
    assert mark is not None
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
    with without_torch_function():
        return _answered(Call(func, _name_of(func), args, kwargs, logits, mark, by_script))


def _answered(call: Call) -> Any:
    by_script, args, logits = call.by_script, call.args, call.logits
    if call.kwargs.get("out") is not None:
        raise unsupported(f"{call.name}(out=...)", call.mark)
    for rules in (_OF_SCRIPTS, _ALWAYS) if by_script else (_ALWAYS,):
        if (rule := rules.get(call.name)) is not None:
            return rule(call)
    if call.name in _OVER_A_DIM and not _runs_over(call):
        return vocab_rows.over_rows(call)
    if by_script and call.name in vocab_answers.READS and args and args[0] is logits:
        return vocab_answers.answer(call)
    if by_script and call.name in vocab_answers.GATHERED:
        return vocab_answers.of_whole_rows(call)
    return _unknown(call)


def _unknown(call: Call) -> Any:
    """A function of which no table knows what it does: refused, unless it returns no tensor."""
    name = call.name.lstrip(".")
    is_fact = name in _FACTS or name in ("__set__", "__delete__")
    refused = name in _WITH_FEATURES | _READ_BY_HOST | _OVER_A_DIM | vocab_answers.BY_COLUMN
    if refused or (call.by_script and not is_fact):
        raise unsupported(name.strip("_"), call.mark)
    result = call.run()
    if not is_fact and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
        raise unsupported(name, call.mark)
    return result


def _name_of(func: Any) -> str:
    """Of a function; of what reads a property, its name with a dot in front."""
    name = getattr(func, "__name__", "")
    if name != "__get__":
        return str(name)
    read = func.__self__
    return f".{getattr(read, '__name__', None) or getattr(getattr(read, 'fget', None), '__name__', '')}"


def _runs_over(call: Call) -> bool:
    """Whether a function over a dim, or several, runs over the vocabulary."""
    args, name, ndim = call.args, call.name, call.logits.ndim
    given = [
        arg
        for arg in args[_BEFORE_DIM.get(name, 1) :]
        if isinstance(arg, int | tuple | list) and not isinstance(arg, bool)
    ]
    dim = call.kwargs.get("dim", call.kwargs.get("axis", given[0] if given else None))
    if name == "multinomial" or dim is None:
        return name != "topk" or call.mark.dim == ndim - 1
    return any(one % ndim == call.mark.dim for one in (dim if isinstance(dim, (tuple, list)) else (dim,)))


def _float(call: Call) -> Any:
    if not call.by_script and call.logits.dtype in (torch.float16, torch.bfloat16):
        return hand_on(call.logits.view_as(call.logits), call.mark._replace(promote=True))
    return vocab_rows.elementwise(call)


def _size(call: Call) -> Any:
    sizes = whole_sizes(call.logits)
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    return sizes if dim is None else sizes[dim]


def _is_same_size(call: Call) -> bool:
    first, other = (*call.args, *call.kwargs.values())
    return whole_sizes(first) == whole_sizes(other)


Rule = Callable[[Call], Any]
_ALWAYS: dict[str, Rule] = {
    **dict.fromkeys(
        ("cross_entropy", "sharded_cross_entropy"), lambda call: sharded_cross_entropy(*call.args, **call.kwargs)
    ),
    **dict.fromkeys(_ELEMENTWISE, vocab_rows.elementwise),
    **dict.fromkeys(_CREATORS, Call.run),
    **dict.fromkeys(vocab_rows.DEAL_ROWS, vocab_rows.deal),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), vocab_rows.join),
    **dict.fromkeys(("view", "reshape"), vocab_rows.view),
    **dict.fromkeys(("view_as", "reshape_as", "expand_as"), vocab_rows.as_other),
    **dict.fromkeys(
        ("transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "unsqueeze"), vocab_rows.reorder
    ),
    **dict.fromkeys(("flatten", "unflatten"), vocab_rows.merge),
    **dict.fromkeys(("contiguous", "detach", "clone", ".data", ".grad"), vocab_rows.keep),
    **dict.fromkeys((".shape", "size"), _size),
    **dict.fromkeys(("numel", "nelement"), lambda call: whole_numel(call.logits)),
    "__len__": lambda call: whole_sizes(call.logits)[0],
    "is_same_size": _is_same_size,
    "broadcast_tensors": vocab_rows.broadcast,
    "expand": vocab_rows.expand,
    "float": _float,
    "squeeze": vocab_rows.squeeze,
    "__getitem__": vocab_rows.rows_at,
    "__setitem__": vocab_answers.set_item,
    "__iter__": vocab_rows.iterate,
}
_OF_SCRIPTS: dict[str, Rule] = {
    "__getitem__": vocab_answers.item_at,
    "nll_loss": vocab_answers.nll_loss,
    **dict.fromkeys(vocab_answers.BY_COLUMN, vocab_answers.loss_by_column),
}


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
    mark = mark_of(input)
    assert mark is not None
    if weight is not None:
        raise unsupported("cross_entropy(weight=...)", mark)
    if size_average is not None or reduce is not None:
        raise unsupported("cross_entropy(size_average=..., reduce=...), deprecated in torch; reduction= works", mark)
    if target.is_floating_point():
        raise unsupported("cross_entropy with class probabilities", mark)
    class_dim = 0 if input.ndim == 1 else 1
    if mark.dim != class_dim:
        raise unsupported(f"cross_entropy over dim {class_dim} while the vocabulary is dim {mark.dim}", mark)
    targets = target.reshape(-1)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    loss = fused_loss(input, targets, **options) if isinstance(input, LazyLogits) else None
    if loss is None:
        flat = input.movedim(class_dim, -1).reshape(-1, mark.shard.local)
        loss = vocab_cross_entropy(flat, targets, mark.shard, **options)
    return loss.view(target.shape) if reduction == "none" else loss
