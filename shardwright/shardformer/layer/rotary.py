"""Attention whose rotary positions are computed in one (see `kernels.rotary`).

    fuse_rotary(model)      modules whose methods call a rotary function of their modeling file call ours in its place

Neither the methods nor the modeling files are changed: a module gets a subclass of its class, whose methods have the
code that they had, and names of their own in which the function is ours. Other models of the family, and all other
threads, see nothing of it. A function is known by what it computes: it is tried on random numbers, forward and
backward, against every form there is. What a call does not share with what was tried goes to the model's own function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from ...kernels.rotary import FORMS, Form, rotated
from .parallel_module import ParallelModule, combined_class

Function = Callable[..., Any]


class Rotary(NamedTuple):
    """What a rotary function was found to compute.

    tensors     that it turns: q and k, or one
    heads       dims of the heads that it can be told of, the one that it takes for granted first
    partial     features behind those that have angles are handed through
    doubles     64 bits are computed as such, not rounded to 32 on the way
    """

    form: Form
    tensors: int
    heads: tuple[int, ...]
    partial: bool
    doubles: bool


class FusedRotary(ParallelModule):
    """Base of modules with methods of `_Scope.methods`."""


class _Scope:
    """The names of a modeling file, with rotary functions in one; as they were when `before` was read."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.before = dict(names)
        found = {name: rotary_of(value) for name, value in names.items() if is_rotary(name, value)}
        ours = {name: _in_one(names[name], rotary) for name, rotary in found.items() if rotary is not None}
        self.replaced = frozenset(ours)
        # Without a name, torch.compile does not look names up in the module that they were read from.
        self.names = {name: value for name, value in {**names, **ours}.items() if name != "__name__"}
        self._mixins: dict[type, type | None] = {}

    def is_of(self, names: Mapping[str, Any]) -> bool:
        return len(names) == len(self.before) and all(names.get(name, self) is it for name, it in self.before.items())

    def mixin_of(self, kind: type) -> type | None:
        """With the methods of `kind` that call a rotary function; None where there are none."""
        if kind not in self._mixins:
            methods = {name: self._copied(method) for name, method in _methods_of(kind) if self._concerns(method)}
            self._mixins[kind] = type("FusedRotary", (FusedRotary,), methods) if methods else None
        return self._mixins[kind]

    def _concerns(self, method: FunctionType) -> bool:
        return self.is_of(method.__globals__) and not self.replaced.isdisjoint(method.__code__.co_names)

    def _copied(self, method: FunctionType) -> FunctionType:
        made = FunctionType(method.__code__, self.names, method.__name__, method.__defaults__, method.__closure__)
        made.__kwdefaults__, made.__annotations__ = method.__kwdefaults__, method.__annotations__
        made.__qualname__, made.__module__, made.__doc__ = method.__qualname__, method.__module__, method.__doc__
        made.__dict__.update(method.__dict__)
        return made


_scopes: dict[int, _Scope] = {}  # by the names that they are of


def _scope_of(names: dict[str, Any]) -> _Scope:
    scope = _scopes.get(id(names))
    if scope is None or not scope.is_of(names):  # somebody has put something else into the file since
        scope = _scopes[id(names)] = _Scope(names)
    return scope


def is_rotary(name: str, value: Any) -> bool:
    return "rotary" in name.lower() and callable(value) and not isinstance(value, type | nn.Module)


def fuse_rotary(model: nn.Module) -> int:
    """In place; of how many modules."""
    found = list(_rotating(model))
    for module, mixin in found:
        module.__class__ = combined_class(mixin, type(module))
    return len(found)


def has_rotary(model: nn.Module) -> bool:
    return any(True for _ in _rotating(model))


def _rotating(model: nn.Module) -> Iterator[tuple[nn.Module, type]]:
    """Modules, and what their classes are to be mixed with."""
    mixins: dict[type, type | None] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in mixins:
            mixins[kind] = _mixin_for(kind)
        mixin = mixins[kind]
        if mixin is not None and "forward" not in vars(module):
            yield module, mixin


def _mixin_for(kind: type) -> type | None:
    if issubclass(kind, FusedRotary):
        return None
    for _, method in _methods_of(kind):
        names = method.__globals__
        if any(is_rotary(name, names.get(name)) for name in method.__code__.co_names if name in names):
            mixin = _scope_of(names).mixin_of(kind)
            if mixin is not None:
                return mixin
    return None


def _methods_of(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """As they are called on modules of this class; not those of torch."""
    seen: set[str] = set()
    for cls in kind.__mro__:
        if cls.__module__.startswith("torch."):
            continue
        for name, value in vars(cls).items():
            if name not in seen and isinstance(value, FunctionType) and not hasattr(value, "__wrapped__"):
                yield name, value
            seen.add(name)


def _in_one(own: Function, rotary: Rotary) -> Function:
    """What takes the place of `own`."""
    count = rotary.tensors

    def rotary_in_one(*args: Any, **kwargs: Any) -> Any:
        heads = kwargs.get("unsqueeze_dim", rotary.heads[0])
        plain = torch.compiler.is_compiling() or len(args) != count + 2 or not kwargs.keys() <= {"unsqueeze_dim"}
        if plain or heads not in rotary.heads or not _fits(args[:count], args[count:], rotary, heads):
            return own(*args, **kwargs)
        turned = tuple(rotated(x, args[count], args[count + 1], rotary.form, heads) for x in args[:count])
        return turned if count > 1 else turned[0]

    return rotary_in_one


def _fits(given: tuple[Any, ...], angles: tuple[Any, ...], rotary: Rotary, heads: int) -> bool:
    """Whether this is a call like those that were tried."""
    cos, sin = angles
    if not all(type(x) is Tensor for x in (*given, cos, sin)) or cos.ndim != 3 or cos.shape != sin.shape:
        return False
    if cos.requires_grad or sin.requires_grad or cos.dtype != sin.dtype:
        return False
    if cos.dtype == torch.float64 and not rotary.doubles:
        return False
    width = rotary.form.width(cos)
    return width % 2 == 0 and all(
        x.ndim == 4
        and x.dtype == cos.dtype
        and x.device == cos.device
        and cos.shape[0] in (1, x.shape[0])
        and cos.shape[1] == x.shape[3 - heads]
        and (width == x.shape[3] or (rotary.partial and width < x.shape[3]))
        for x in given
    )


def rotary_of(own: Function) -> Rotary | None:
    """What the function computes; None where it is none of the forms."""
    try:
        parameters = inspect.signature(own).parameters
    except (TypeError, ValueError):
        return None
    for form in FORMS:
        for count in (2, 1):
            for heads in (1, 2):
                if _agrees(own, form, count, heads, {}):
                    other = 3 - heads
                    told = "unsqueeze_dim" in parameters and _agrees(own, form, count, other, {"unsqueeze_dim": other})
                    told = told and _agrees(own, form, count, heads, {"unsqueeze_dim": heads})
                    dims = (heads, other) if told else (heads,)
                    partial = all(_agrees(own, form, count, dim, _told(dim, dims), rest=4) for dim in dims)
                    doubles = _agrees(own, form, count, heads, {}, dtype=torch.float64)
                    wide = _is_wide(own, form, count, heads)
                    return Rotary(form._replace(wide=wide), count, dims, partial, doubles)
    return None


def _told(heads: int, dims: tuple[int, ...]) -> dict[str, int]:
    return {"unsqueeze_dim": heads} if len(dims) > 1 else {}


def _trial(form: Form, count: int, heads: int, rest: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """Tensors of different numbers of heads, and angles that nothing ties to each other."""
    generator = torch.Generator().manual_seed(0)
    width, batch, length = 8, 2, 5
    given = []
    for number in (4, 3)[:count]:
        shape = (batch, number, length, width + rest) if heads == 1 else (batch, length, number, width + rest)
        given.append(torch.randn(shape, generator=generator).to(dtype).requires_grad_())
    features = width // 2 if form.angles == "half" else width
    cos, sin = (torch.randn(batch, length, features, generator=generator).to(dtype) for _ in range(2))
    return given, cos, sin


def _agrees(
    own: Function,
    form: Form,
    count: int,
    heads: int,
    kwargs: Mapping[str, Any],
    rest: int = 0,
    dtype: torch.dtype = torch.float32,
) -> bool:
    given, cos, sin = _trial(form, count, heads, rest, dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    with torch.enable_grad():
        try:
            found = own(*given, cos, sin, **kwargs)
        except Exception:  # a foreign function on made-up numbers
            return False
        results = found if isinstance(found, tuple) else (found,)
        if len(results) != count or isinstance(found, tuple) != (count > 1):
            return False
        for x, result in zip(given, results, strict=True):
            if not isinstance(result, Tensor) or result.shape != x.shape or not result.requires_grad:
                return False
            expected = rotated(x, cos, sin, form, heads)
            slopes = torch.linspace(-1, 1, x.numel(), dtype=dtype).view(x.shape)
            own_slope, slope = (torch.autograd.grad(y, x, slopes.to(y.dtype))[0] for y in (result, expected))
            for one, other in ((result, expected), (own_slope, slope)):
                if one.dtype != other.dtype or (one - other).abs().max() > tolerance * other.abs().max():
                    return False
    return True


def _is_wide(own: Function, form: Form, count: int, heads: int) -> bool:
    """Whether it computes numbers of 16 bits in 32."""
    given, cos, sin = _trial(form, count, heads, 0, torch.bfloat16)
    with torch.no_grad():
        found = own(*given, cos, sin)
        return torch.equal(
            found[0] if count > 1 else found, rotated(given[0], cos, sin, form._replace(wide=True), heads)
        )
