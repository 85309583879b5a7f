"""Attention whose rotary positions are computed in one (see `kernels.rotary`).

    fuse_rotary(model)      modules whose methods call a rotary function of their modeling file call ours in its place

No method is changed: a module gets a subclass of its class, whose methods have the code that they had, but for the name
of the function, which is that of ours, put into the modeling file beside its own. So they read the file as it is when
they run, and other models of the family see nothing of it. A function is known by what it computes: it is tried on
random numbers, forward and backward, against every form there is. What a call does not share with what was tried goes
to the model's own function, and so does every call once that function, or what it calls in turn, is another one.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from ...kernels.backends import PLAIN_TENSORS, operators_only
from ...kernels.rotary import FORMS, Form, rotated
from .parallel_module import ParallelModule, combined_class

Function = Callable[..., Any]
_OURS = "_in_one"


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
    """Base of modules with changed methods."""


class _Named:
    """A rotary function by the name that a modeling file has for it.

    helpers     what the function reads from its own file
    other       our name in the modeling file; empty where the function is of no known form
    """

    def __init__(self, names: dict[str, Any], name: str) -> None:
        self.names, self.name, self.own = names, name, names[name]
        code = getattr(inspect.unwrap(self.own), "__code__", None)
        self.around: dict[str, Any] = getattr(inspect.unwrap(self.own), "__globals__", {})
        read = code.co_names if isinstance(code, CodeType) else ()
        self.helpers = {helper: self.around[helper] for helper in read if helper in self.around}
        rotary, self.other = rotary_of(self.own), ""
        if rotary is not None:
            self.other = f"_{name}_{len(names)}{_OURS}"
            names[self.other] = _in_one(self, rotary)

    def is_current(self) -> bool:
        """Whether the file has the function still that was tried."""
        return self.names.get(self.name) is self.own and all(
            self.around.get(helper) is value for helper, value in self.helpers.items()
        )


_named: dict[tuple[int, str], _Named] = {}  # by the names of a file, and the function's in it
_mixins: dict[Any, type] = {}  # by the class, and what its methods call in place of what


def _named_of(names: dict[str, Any], name: str) -> _Named:
    known = _named.get((id(names), name))
    if known is None or known.names is not names or not known.is_current():
        known = _named[id(names), name] = _Named(names, name)
    return known


def _renamed(method: FunctionType) -> dict[str, str]:
    """The rotary functions that a method calls, and ours in their place."""
    names = method.__globals__
    found = {name: _named_of(names, name) for name in method.__code__.co_names if is_rotary(name, names.get(name))}
    others = {name: named.other for name, named in found.items() if named.other}
    for step in dis.get_instructions(method.__code__) if others else ():
        if step.argval in others and step.opname not in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_CONST"):
            return {}  # an attribute of the same name
    return others


def _copied(method: FunctionType, others: Mapping[str, str]) -> FunctionType:
    code = method.__code__.replace(co_names=tuple(others.get(name, name) for name in method.__code__.co_names))
    made = FunctionType(code, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__, made.__annotations__ = method.__kwdefaults__, method.__annotations__
    made.__qualname__, made.__module__, made.__doc__ = method.__qualname__, method.__module__, method.__doc__
    made.__dict__.update(method.__dict__)
    return made


def is_rotary(name: str, value: Any) -> bool:
    known = callable(value) and not isinstance(value, type | nn.Module)
    return known and "rotary" in name.lower() and not name.endswith(_OURS)


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
    """With the methods of `kind` that call a rotary function; None where there are none."""
    if issubclass(kind, FusedRotary):
        return None
    methods = dict(_methods_of(kind))
    renamed = {name: others for name, method in methods.items() if (others := _renamed(method))}
    if not renamed:
        return None
    key = kind, tuple((name, methods[name], *others.items()) for name, others in renamed.items())
    if key not in _mixins:
        copied = {name: _copied(methods[name], others) for name, others in renamed.items()}
        _mixins[key] = type("FusedRotary", (FusedRotary,), copied)
    return _mixins[key]


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


def _in_one(named: _Named, rotary: Rotary) -> Function:
    """What takes the place of `named.own`."""
    own, count = named.own, rotary.tensors

    def rotary_in_one(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        if not named.is_current():
            return named.names[named.name](*args, **kwargs)
        heads = kwargs.get("unsqueeze_dim", rotary.heads[0])
        plain = operators_only() or len(args) != count + 2 or not kwargs.keys() <= {"unsqueeze_dim"}
        if plain or heads not in rotary.heads or not _fits(args[:count], args[count:], rotary, heads):
            return own(*args, **kwargs)
        turned = tuple(rotated(x, args[count], args[count + 1], rotary.form, heads) for x in args[:count])
        return turned if count > 1 else turned[0]

    return rotary_in_one


def _fits(given: tuple[Any, ...], angles: tuple[Any, ...], rotary: Rotary, heads: int) -> bool:
    """Whether this is a call like those that were tried."""
    cos, sin = angles
    if not all(type(x) in PLAIN_TENSORS for x in (*given, cos, sin)) or cos.ndim != 3 or cos.shape != sin.shape:
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
