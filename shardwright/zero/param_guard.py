"""Who looks at a parameter while its gradient or its value is on the way.

A script holds plain `nn.Parameter` objects, and reads `param.grad` or the values whenever it likes: torch's
clip_grad_norm_, an average of weights over a list made before boost. While a plain read would return something half
done, the parameter's *class* is swapped for one that asks first:

    gradients asked   from the end of a backward to zero_grad, `param.grad` goes to `GradientReads`
    values pending    from step to the arrival of its gather, every operation on the parameter goes to `ValueReads`
    data watched      while a script may write to a parameter whose master is a copy, `param.data` goes to `DataReads`:
                      autograd does not count what is written there; and `param.grad = tensor` is refused in a dtype in
                      which this parameter has no gradients, with what to write instead

Outside of these windows, and inside the model's forward and backward, the class is the parameter's own again: compiled
code, type checks and speed know nothing of this. The classes have the layout of their base and no attributes, so that
swapping costs a tenth of a microsecond; what they ask is reached by weak reference.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from ..comm.compat import HOOK_LISTS, TENSOR_DATA
from ..utils.pytree import tree_leaves

_TENSOR: Any = torch.Tensor
_GRAD = _TENSOR.grad  # the descriptor


def own_gradient(param: nn.Parameter) -> torch.Tensor | None:
    """`param.grad` for those who make gradients, whoever is asked about them at the moment."""
    grad: torch.Tensor | None = _GRAD.__get__(param)
    return grad


def set_own_gradient(param: nn.Parameter, value: torch.Tensor | None) -> None:
    _GRAD.__set__(param, value)


def drop_own_gradient(param: nn.Parameter) -> None:
    set_own_gradient(param, None)


class GradientReads(Protocol):
    """Answers for gradients; raises ValueError where it cannot."""

    def read_gradient(self, param: nn.Parameter) -> torch.Tensor | None: ...

    def write_gradient(self, param: nn.Parameter, value: torch.Tensor | None) -> None: ...


class ValueReads(Protocol):
    def values_wanted(self, params: Iterable[nn.Parameter]) -> None:
        """Complete the values of these parameters, and close their windows."""


class DataReads(Protocol):
    def read_data(self, param: nn.Parameter) -> torch.Tensor: ...


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
    *HOOK_LISTS,
    _GRAD.__set__,
    _TENSOR.requires_grad.__set__,
    torch.Tensor.__len__,
    torch.Tensor.dim,
    torch.Tensor.element_size,
    torch.Tensor.get_device,
    torch.Tensor.is_complex,
    torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point,
    torch.Tensor.numel,
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.requires_grad_,
    torch.Tensor.size,
    torch.Tensor.storage_offset,
    torch.Tensor.stride,
    torch.is_complex,
    torch.is_floating_point,
    torch.numel,
}
if hasattr(torch.Tensor, "grad_dtype"):
    METADATA |= {_TENSOR.grad_dtype.__get__, _TENSOR.grad_dtype.__set__}


class _Kind:
    """Parameters of one class that are guarded alike. `classes` by (gradients asked, values pending, data watched)."""

    def __init__(self, classes: dict[tuple[bool, bool, bool], type], watched: bool) -> None:
        self.classes = classes
        self.watched = watched
        self.params: list[nn.Parameter] = []
        self.shown = classes[False, False, False]


class ParamGuard:
    """The windows of some parameters, of which `watched` have masters of their own. Who answers is held by weak
    reference; without it reads are plain."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        watched: Collection[nn.Parameter],
        gradients: GradientReads,
        values: ValueReads,
        data: DataReads,
    ) -> None:
        self._asks = self._watches = False
        self._pending: set[nn.Parameter] = set()
        self._kinds: dict[tuple[type, bool], _Kind] = {}
        self._kind_of: dict[nn.Parameter, _Kind] = {}
        made: dict[type, dict[tuple[bool, bool, bool], type]] = {}
        for param in params:
            own = getattr(type(param), "own_class", type(param))  # of a guard before
            if own not in made:
                made[own] = _guarded(own, weakref.ref(gradients), weakref.ref(values), weakref.ref(data))
            kind = self._kinds.setdefault((own, param in watched), _Kind(made[own], param in watched))
            kind.params.append(param)
            self._kind_of[param] = kind
            param.__class__ = own

    def show(self, *, asks: bool, watches: bool) -> None:
        """Whether reads of gradients are asked about, and `param.data` is watched, from here on."""
        self._asks, self._watches = asks, watches
        for kind in self._kinds.values():
            shown = kind.classes[asks, False, watches and kind.watched]
            if shown is not kind.shown:
                kind.shown = shown
                pending = kind.classes[asks, True, watches and kind.watched]
                for param in kind.params:
                    param.__class__ = pending if param in self._pending else shown

    def values_pending(self, params: Iterable[nn.Parameter], pending: bool) -> None:
        for param in params:
            if pending:
                self._pending.add(param)
            else:
                self._pending.discard(param)
            self._swap(param)

    def _swap(self, param: nn.Parameter) -> None:
        kind = self._kind_of[param]
        param.__class__ = kind.classes[self._asks, param in self._pending, self._watches and kind.watched]


def _require_dtype(param: torch.Tensor, value: Any) -> None:
    """Torch's own refusal advises to change `grad_dtype`, which tells how the gradients of a step are summed."""
    wanted: torch.dtype | None = getattr(param, "grad_dtype", None)
    if wanted is not None and isinstance(value, torch.Tensor) and value.dtype != wanted:
        raise ValueError(
            f"param.grad = tensor of {value.dtype}, for a parameter of shape {tuple(param.shape)} in {param.dtype} "
            f"whose gradients come in {wanted} now: assign tensor.to(param.grad_dtype), and leave grad_dtype as it is"
        )


def _guarded(
    own: type, gradients: weakref.ref[GradientReads], values: weakref.ref[ValueReads], data: weakref.ref[DataReads]
) -> dict[tuple[bool, bool, bool], type]:
    """`own` and sub-classes of it by (gradients asked, values pending, data watched)."""

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

    class Watched(Guarded):
        @property
        def data(self) -> torch.Tensor:
            here = data()
            values: torch.Tensor = TENSOR_DATA.__get__(self) if here is None else here.read_data(self)
            return values

        @data.setter
        def data(self, value: torch.Tensor) -> None:
            TENSOR_DATA.__set__(self, value)

        @property
        def grad(self) -> torch.Tensor | None:
            return _GRAD.__get__(self)

        @grad.setter
        def grad(self, value: torch.Tensor | None) -> None:
            _require_dtype(self, value)
            _GRAD.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:
            self.grad = None

    classes: dict[tuple[bool, bool, bool], type] = {}
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    for asked, pending, watched in itertools.product((False, True), repeat=3):
        bases = (Asked,) * asked + (Pending,) * pending + (Watched,) * watched
        classes[asked, pending, watched] = type(own.__name__, bases, names) if bases else own
    return classes
