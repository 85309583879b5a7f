"""Results of common operators on tensors without data.

Torch works out the shape of a product or a softmax of meta tensors in Python, in 0.1 to 1 ms. For the cases that nearly
every operator of a model is one of (one floating dtype, contiguous memory) the answer is plain: what is computed
element by element has the shape that its arguments broadcast to, their dtype, and contiguous memory as well. All others
are left to torch, also those with an error in them, and what it found is remembered: layers that are alike ask for the
same hundred results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch

_aten = torch.ops.aten

_MOST_REMEMBERED = 4096
_SCALARS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN_KINDS = frozenset((torch.Tensor, torch.nn.Parameter))
_CONTENTS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_remembered: dict[Hashable, tuple[type, tuple[Any, ...]]] = {}


def find_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns; None where torch has to find out."""
    rule = _RULES.get(func)
    return None if rule is None else rule(args, kwargs)


def has_rule(func: Any) -> bool:
    return func in _RULES


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: frozenset[type] = _PLAIN_KINDS) -> Any:
    """`func(*args, **kwargs)`, which torch is asked for once per form of the arguments where that decides the result:
    for operators that change nothing, return no view, draw no random numbers and read no contents.

    kinds  of tensors whose shape, strides and dtype are all there is to them
    """
    form = _form((args, tuple(kwargs.items())), kinds) if _follows_from_forms(func) else None
    if form is None:
        return func(*args, **kwargs)
    key = func, form, torch.get_default_dtype()
    if key not in _remembered:
        found = func(*args, **kwargs)
        results = _form(found if type(found) in (tuple, list) else (found,), _PLAIN_KINDS)
        if results is None or not all(isinstance(result[0], torch.Size) for result in results):
            return found
        if len(_remembered) >= _MOST_REMEMBERED:
            _remembered.clear()
        _remembered[key] = type(found), results
        return found
    kind, results = _remembered[key]
    made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in results]
    return kind(made) if kind in (tuple, list) else made[0]


@cache
def _follows_from_forms(func: Any) -> bool:
    schema = func._schema
    return (
        func.namespace == "aten"
        and not any(value.alias_info for value in (*schema.arguments, *schema.returns))
        and _CONTENTS.isdisjoint(func.tags)
    )


def _form(value: Any, kinds: frozenset[type]) -> Any:
    """All that operators may read of arguments without contents, hashable; None where there is more to them.

    A scalar stands beside its type: 2 and 2.0 are equal, and what is computed with them need not have one dtype.
    """
    kind = type(value)
    if kind in kinds:
        known = value.is_meta and value.layout is torch.strided and not (value.is_conj() or value.is_neg())
        return (value.shape, value.stride(), value.dtype) if known else None
    if kind in _SCALARS:
        return kind, value
    if kind is tuple or kind is list or kind is torch.Size:
        forms = tuple(_form(one, kinds) for one in value)
        return None if None in forms else forms
    return None


def _plain(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.is_meta and tensor.is_floating_point() and tensor.is_contiguous()


def _made(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _elementwise(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    others = [value for value in (*args, *kwargs.values()) if not isinstance(value, torch.Tensor)]
    first = tensors[0]
    if not all(map(_plain, tensors)) or not all(isinstance(value, int | float) for value in others):
        return None
    if any(tensor.dtype is not first.dtype for tensor in tensors):
        return None
    shape = first.shape
    for tensor in tensors[1:]:
        if tensor.shape != shape:
            return _broadcast(tensors)
    return _made(shape, first.dtype)


def _broadcast(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """Where one has the shape of the result, whose memory is then laid out as that one's."""
    largest = max(tensors, key=torch.Tensor.dim)
    for tensor in tensors:
        behind = largest.shape[largest.dim() - tensor.dim() :]
        if any(size not in (1, other) for size, other in zip(tensor.shape, behind, strict=True)):
            return None
    return _made(largest.shape, largest.dtype)


def _along_dim(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """softmax and its like: (tensor, dim, whether half becomes float)"""
    if kwargs or len(args) != 3 or args[2] is not False or not _plain(args[0]):
        return None
    rank = args[0].dim()
    return _made(args[0].shape, args[0].dtype) if -rank <= args[1] < rank else None


def _safe_softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return _along_dim((*args, False), kwargs) if len(args) == 2 else None


def _mean(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """(tensor, [last dim], whether it stays)"""
    if kwargs or len(args) != 3 or list(args[1]) != [-1] or args[2] is not True or not _plain(args[0]):
        return None
    return _made((*args[0].shape[:-1], 1), args[0].dtype) if args[0].dim() else None


def _nll_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(logarithms [n, classes], targets [n], weight, reduction, ignored target): (loss, sum of weights)"""
    if kwargs or len(args) != 5 or args[2] is not None or not _plain(args[0]) or not args[1].is_meta:
        return None
    logs, targets, _, reduction, _ = args
    if logs.dim() != 2 or targets.dtype is not torch.long or targets.shape != logs.shape[:1]:
        return None
    return _made(logs.shape[:1] if reduction == 0 else (), logs.dtype), _made((), logs.dtype)


def _product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Of matrices [m, k] and [k, n], however they lie in memory."""
    first, second = args
    if kwargs or not all(tensor.is_meta and tensor.is_floating_point() and tensor.dim() == 2 for tensor in args):
        return None
    if first.dtype is not second.dtype or first.shape[1] != second.shape[0]:
        return None
    return _made((first.shape[0], second.shape[1]), first.dtype)


_ELEMENTWISE = (
    *(_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.pow.Tensor_Scalar),
    *(_aten.add.Scalar, _aten.sub.Scalar, _aten.mul.Scalar, _aten.div.Scalar),
    *(_aten.neg.default, _aten.rsqrt.default, _aten.silu.default, _aten.tanh.default, _aten.sigmoid.default),
    *(_aten.exp.default, _aten.cos.default, _aten.sin.default, _aten.relu.default),
)
_RULES: dict[Any, Callable[[tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    _aten._log_softmax.default: _along_dim,
    _aten._softmax.default: _along_dim,
    _aten._safe_softmax.default: _safe_softmax,
    _aten.mean.dim: _mean,
    _aten.mm.default: _product,
    _aten.nll_loss_forward.default: _nll_loss,
}
