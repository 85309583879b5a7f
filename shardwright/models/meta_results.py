"""Results of common operators on tensors without data.

Torch works out the shape of a product or a softmax of meta tensors in Python, in 0.1 to 1 ms. For the cases that nearly
every operator of a model is one of (one floating dtype, contiguous memory) the answer is plain: what is computed
element by element has the shape that its arguments broadcast to, their dtype, and contiguous memory as well. All others
are left to torch, also those with an error in them, and what it found is remembered: layers that are alike ask for the
same hundred results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

_aten = torch.ops.aten

_MOST_REMEMBERED = 4096
_SCALARS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_CONTENTS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def find_result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `func` returns; None where torch has to find out."""
    rule = _RULES.get(func)
    return None if rule is None else rule(args, kwargs)


def has_rule(func: Any) -> bool:
    return func in _RULES


class Remembered:
    """Results of operators by the form of their arguments, where that decides them.

    kinds  of tensors that have nothing but a shape, strides and a dtype, on the meta device
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self._kinds = frozenset(kinds)
        self._found: dict[Hashable, tuple[type, tuple[Any, ...]]] = {}

    def key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], place: Hashable = None) -> Hashable:
        """Of operators that change nothing, return no view, draw no random numbers and read no contents; else None.
        place: what else decides the result.
        """
        form = self._form((args, tuple(kwargs.items()))) if _follows_from_forms(func) else None
        return None if form is None else (func, form, torch.get_default_dtype(), place)

    def recall(self, key: Hashable) -> Any:
        """New tensors; None where nothing is known."""
        if key not in self._found:
            return None
        kind, results = self._found[key]
        made = [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in results]
        return kind(made) if kind in (tuple, list) else made[0]

    def note(self, key: Hashable, found: Any) -> None:
        results = self._form(found if type(found) in (tuple, list) else (found,))
        if results is None or not all(isinstance(result[0], torch.Size) for result in results):
            return
        if len(self._found) >= _MOST_REMEMBERED:
            self._found.clear()
        self._found[key] = type(found), results

    def _form(self, value: Any) -> Any:
        """All that operators may read of arguments without contents, hashable; None where there is more to them.

        A scalar stands beside its type: 2 and 2.0 are equal, and what is computed with them need not have one dtype.
        """
        kind = type(value)
        if kind in self._kinds:
            known = value.is_meta and value.layout is torch.strided and not (value.is_conj() or value.is_neg())
            return (value.shape, value.stride(), value.dtype) if known else None
        if kind in _SCALARS:
            return kind, value
        if kind is tuple or kind is list or kind is torch.Size:
            forms = tuple(map(self._form, value))
            return None if None in forms else forms
        return None


_remembered = Remembered((torch.Tensor, torch.nn.Parameter))


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`func(*args, **kwargs)`, which torch is asked for once per form of the arguments."""
    key = _remembered.key(func, args, kwargs)
    if key is None:
        return func(*args, **kwargs)
    found = _remembered.recall(key)
    if found is None:
        found = func(*args, **kwargs)
        _remembered.note(key, found)
    return found


@cache
def _follows_from_forms(func: Any) -> bool:
    schema = func._schema
    return (
        func.namespace == "aten"
        and not any(value.alias_info for value in (*schema.arguments, *schema.returns))
        and _CONTENTS.isdisjoint(func.tags)
    )


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
    if kwargs or len(args) != 3 or args[1] is None or list(args[1]) != [-1]:  # None: all of them
        return None
    if args[2] is not True or not _plain(args[0]) or not args[0].dim():
        return None
    return _made((*args[0].shape[:-1], 1), args[0].dtype)


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
