"""Who looks at a parameter while its gradient or its value is on the way.

A script holds plain `nn.Parameter` objects, and reads `param.grad` or the values whenever it likes: torch's clip_grad_norm_, an
average of weights over a list made before boost. While a plain read would return something half done, the parameter's *class* is
swapped for one that asks first:

    gradients asked   from the end of a backward to zero_grad, `param.grad` goes to `GradientReads`
    values pending    from step to the arrival of its gather, every operation on the parameter goes to `ValueReads`

Outside of these windows, and inside the model's forward and backward, the class is the parameter's own again: compiled code, type checks
and speed know nothing of this. The classes have the layout of their base and no attributes, so that swapping costs a tenth of a
microsecond; what they ask is reached by weak reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from ..utils.pytree import tree_leaves

_GRAD: Any = torch.Tensor.grad  # the descriptor


class GradientReads(Protocol):
    """Answers for gradients; raises ValueError where it cannot."""

    def read_gradient(self, param: nn.Parameter) -> torch.Tensor | None: ...

    def write_gradient(self, param: nn.Parameter, value: torch.Tensor | None) -> None: ...


class ValueReads(Protocol):
    def values_wanted(self, params: Iterable[nn.Parameter]) -> None:
        """Complete the values of these parameters, and close their windows."""


# What can be asked of a tensor without looking at its values.
METADATA: set[Any] = {
    getattr(torch.Tensor, name).__get__
    for name in (
        "device",
        "dtype",
        "grad",
        "grad_fn",
        "is_cpu",
        "is_cuda",
        "is_leaf",
        "is_meta",
        "is_sparse",
        "itemsize",
        "layout",
        "nbytes",
        "ndim",
        "requires_grad",
        "shape",
        "_version",
    )
} | {
    _GRAD.__set__,
    torch.Tensor.__len__,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.size,
    torch.Tensor.stride,
}


class ParamGuard:
    """The windows of some parameters. `gradients` and `values` are held by weak reference; without them reads are plain."""

    def __init__(self, params: Iterable[nn.Parameter], gradients: GradientReads, values: ValueReads) -> None:
        self._own = {param: getattr(type(param), "own_class", type(param)) for param in params}  # of a guard before
        self._classes = {own: _guarded(own, weakref.ref(gradients), weakref.ref(values)) for own in set(self._own.values())}
        self.asks_for_gradients = False
        self._pending: set[nn.Parameter] = set()

    def ask_for_gradients(self, wanted: bool) -> None:
        if wanted != self.asks_for_gradients:
            self.asks_for_gradients = wanted
            for param in self._own:
                self._swap(param)

    def values_pending(self, params: Iterable[nn.Parameter], pending: bool) -> None:
        for param in params:
            if pending:
                self._pending.add(param)
            else:
                self._pending.discard(param)
            self._swap(param)

    def _swap(self, param: nn.Parameter) -> None:
        own = self._own[param]
        key = (self.asks_for_gradients, param in self._pending)
        param.__class__ = self._classes[own][key] if any(key) else own


def _guarded(own: type, gradients: weakref.ref[GradientReads], values: weakref.ref[ValueReads]) -> dict[tuple[bool, bool], type]:
    """Sub-classes of `own` by (gradients asked, values pending)."""

    class Guarded(own):  # type: ignore[misc, valid-type]
        own_class = own

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            copied = super().__deepcopy__(memo)
            copied.__class__ = own
            return copied

    class Asked(Guarded):
        @property
        def grad(self) -> torch.Tensor | None:
            here = gradients()
            return _GRAD.__get__(self) if here is None else here.read_gradient(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            here = gradients()
            if here is None:
                _GRAD.__set__(self, value)
            else:
                here.write_gradient(self, value)

        @grad.deleter
        def grad(self) -> None:
            self.grad = None

    class Pending(Guarded):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            here = values()
            if func in METADATA or here is None:
                return super().__torch_function__(func, types, args, kwargs)
            here.values_wanted([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Pending)])
            return func(*args, **kwargs)

    class Both(Asked, Pending):
        pass

    classes: dict[tuple[bool, bool], type] = {(True, False): Asked, (False, True): Pending, (True, True): Both}
    for made in classes.values():
        made.__name__, made.__qualname__, made.__module__ = own.__name__, own.__qualname__, own.__module__
    return classes
