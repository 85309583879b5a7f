"""MLPs with a gate, act(gate(x)) * up(x), whose activation and product are computed in one (see `kernels.gated`).

    fuse_activations(model)     the activations of such MLPs wait for what they are multiplied by

The forward of an MLP stays the model's own: an activation returns `Activated`, which stands for act(gate). A product
with a tensor of its shape takes both in one; anything else that is done to it is done to act(gate). So the numbers are
right whatever a forward does, in dense MLPs with projections apart or packed, with adapters or dropout, and in experts.
Which activations wait is found by trying: those that compute SiLU or GELU, in modules that turn out to multiply what
they return, and do nothing else with it, when a copy with small linears is run, forward and backward.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ...comm.compat import hooks_of_all_modules
from ...kernels.backends import PLAIN_TENSORS, operators_only
from ...kernels.gated import ACTIVATIONS, gated
from ...utils.pytree import tree_map_only
from ...utils.torch_names import disable_current_modes
from .parallel_module import ParallelModule, combined_class, native_class

_HOMES = ("torch.nn.modules.activation", "transformers.activations")
_MOST = 2**22  # numbers in the linears of a copy that is tried
_TENSOR: Any = Tensor
_PRODUCTS = (torch.mul, torch.multiply, _TENSOR.mul, _TENSOR.multiply, _TENSOR.__mul__, _TENSOR.__rmul__)


class Activated:
    """act(gate), until it is known what for.

    uses    counts products that were taken in one, and how often numbers were computed, where somebody wants to know
    graded  whether autograd was on where the activation was called
    known   the numbers, once they were asked for: what is done to them in place, or hooked to them, stays done
    """

    __slots__ = ("gate", "graded", "kind", "known", "plain", "uses")

    def __init__(self, gate: Tensor, kind: str, plain: Callable[[Tensor], Tensor], uses: list[int] | None) -> None:
        values = gate, kind, plain, uses, torch.is_grad_enabled(), None
        for name, value in zip(("gate", "kind", "plain", "uses", "graded", "known"), values, strict=True):
            object.__setattr__(self, name, value)

    def value(self) -> Tensor:
        if self.known is None:
            with torch.set_grad_enabled(self.graded):
                object.__setattr__(self, "known", self.plain(self.gate))
            if self.uses is not None:
                self.uses[1] += 1
        return self.known  # type: ignore[no-any-return]

    def __mul__(self, other: Any) -> Tensor:
        if not self._is_waiting_for(other):
            return self.value() * other
        if self.uses is not None:
            self.uses[0] += 1
        return gated(self.gate, other, self.kind)

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> Tensor:
        return self * other if self.known is None else self.known.__imul__(other)  # type: ignore[no-any-return]

    def _is_waiting_for(self, other: Any) -> bool:
        gate = self.gate
        return (
            self.known is None
            and type(other) in (*PLAIN_TENSORS, nn.Parameter)
            and (other.shape, other.dtype, other.device) == (gate.shape, gate.dtype, gate.device)
            and torch.is_grad_enabled() == self.graded
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of protocols that ask, such as copying
            raise AttributeError(name)
        return getattr(self.value(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.value(), name, value)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            one, other = args
            return one * other if isinstance(one, cls) else other * one
        args, kwargs = tree_map_only(Activated, Activated.value, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _of_value(name: str) -> Callable[..., Any]:
    def done_to_value(self: Activated, *args: Any) -> Any:
        return getattr(self.value(), name)(*args)

    return done_to_value


# Which Python looks up in the class.
_OPERATORS = (
    "add radd sub rsub truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul neg pos abs invert "
    "and rand or ror xor rxor lt le gt ge eq ne iadd isub itruediv ifloordiv imod ipow iand ior ixor "
    "getitem setitem len iter reversed contains bool int float complex index array repr format deepcopy reduce_ex"
)
for _operator in _OPERATORS.split(" "):
    setattr(Activated, f"__{_operator}__", _of_value(f"__{_operator}__"))


class GatedActivation(ParallelModule):
    """An activation that waits for the product."""

    kind: str
    uses: list[int] | None = None  # see `Activated`

    def forward(self, x: Tensor) -> Any:
        plain = super().forward
        if operators_only() or type(x) not in PLAIN_TENSORS or self._is_watched():
            return plain(x)
        return Activated(x, self.kind, plain, self.uses)

    def _is_watched(self) -> bool:
        """Whether a hook is to see the numbers, or their gradients."""
        return bool(self._forward_hooks or self._backward_hooks or self._backward_pre_hooks or hooks_of_all_modules())


def fuse_activations(model: nn.Module) -> int:
    """In place; how many."""
    found = _waiting(model)
    for activation, kind in found:
        _let_wait(activation, kind)
    return len(found)


def has_gated_activations(model: nn.Module) -> bool:
    return bool(_waiting(model))


def _let_wait(activation: nn.Module, kind: str) -> GatedActivation:
    activation.__class__ = combined_class(GatedActivation, type(activation))
    assert isinstance(activation, GatedActivation)
    activation.kind = kind
    return activation


@disable_current_modes()  # what is tried is tried with numbers, also where a plan has tensors without memory
def _waiting(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Activations, and what they compute; of those that several modules share, the ones that all of them multiply."""
    known: dict[Any, bool] = {}
    kinds: dict[Any, str | None] = {}
    found: dict[int, tuple[nn.Module, str]] = {}
    otherwise: set[int] = set()
    for parent in model.modules():
        foreign = isinstance(parent, nn.Sequential | nn.ModuleList | nn.ModuleDict) or "forward" in vars(parent)
        for name, child in parent._modules.items():
            if child is None or id(child) in otherwise or not _is_activation(child):
                continue
            what = type(child), repr(child)
            if what not in kinds:
                kinds[what] = _kind_of(child)
            kind = kinds[what]
            alike = (type(parent), name, kind, *_settings(parent))
            if kind is not None and not foreign and alike not in known:
                known[alike] = _multiplies(parent, name, kind)
            if kind is not None and known.get(alike, False) and not foreign:
                found[id(child)] = child, kind
            else:
                otherwise.add(id(child))
    return [activation for key, activation in found.items() if key not in otherwise]


def _is_activation(module: nn.Module) -> bool:
    return (
        native_class(module).__module__ in _HOMES
        and not isinstance(module, GatedActivation)
        and not module._parameters
        and not module._modules
        and not module._forward_hooks
        and not module._backward_hooks
    )


def _kind_of(activation: nn.Module) -> str | None:
    x = torch.linspace(-6, 6, 97, dtype=torch.float64)

    def tried(act: Callable[[Tensor], Any]) -> Tensor:
        leaf = x.clone().requires_grad_()
        with torch.enable_grad():
            y = act(leaf)
            return torch.stack([y.detach(), *torch.autograd.grad(y.sum(), leaf)])

    try:
        own = tried(partial(type(activation).forward, activation))
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    close = (kind for kind, act in ACTIVATIONS.items() if torch.allclose(own, tried(act), rtol=1e-6, atol=1e-6))
    return next(close, None)


def _settings(module: nn.Module) -> Iterator[Any]:
    """What two modules of a class that compute alike have in common."""
    for name, value in sorted(vars(module).items()):
        if isinstance(value, bool | int | float | str) and name not in ("layer_idx", "training"):
            yield name, value
    for name, child in module.named_children():
        yield name, type(child), _size(child)


def _size(module: nn.Module) -> tuple[int, int] | None:
    """(features out, features in) of a linear, also under adapters."""
    while isinstance(inner := getattr(module, "base_layer", None), nn.Module):
        module = inner
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, nn.Embedding):
        return None
    return (weight.shape[1], weight.shape[0]) if hasattr(module, "nf") else (weight.shape[0], weight.shape[1])


def _multiplies(parent: nn.Module, name: str, kind: str) -> bool:
    """Whether `parent` multiplies what its activation `name` returns, does nothing else with it, and computes the same
    when both are in one, in training and in evaluation.
    """
    copied, width = _small(parent)
    if copied is None:
        return False
    plain = copied._modules[name]
    assert plain is not None
    waiting = _let_wait(copy.copy(plain), kind)
    run: Any = getattr(copied, "_apply_gate", None) if not width else copied.forward
    for features in width or [8]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 3, features, generator=generator)
        x = x if width else x[0]
        verdicts = []
        for training in (True, False):
            copied.training, waiting.uses = training, [0, 0]
            found = []
            for activation in (plain, waiting):
                copied._modules[name] = activation
                try:
                    found.append(_tried(run, x, copied))
                except Exception:  # a foreign forward on made-up numbers
                    break
            if len(found) == 2:
                products, others = waiting.uses
                verdicts.append(products > 0 and others == 0 and all(map(_is_close, *found)))
        if verdicts:
            return len(verdicts) == 2 and all(verdicts)
    return False


def _tried(run: Callable[[Tensor], Any], x: Tensor, module: nn.Module) -> list[Tensor]:
    """What comes out, and all gradients."""
    x = x.clone().requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # of dropout
        y = run(x)
        slopes = torch.linspace(-1, 1, y.numel()).view(y.shape)
        gradients = torch.autograd.grad(y, [x, *module.parameters()], slopes, allow_unused=True)
    return [y.detach(), *(gradient for gradient in gradients if gradient is not None)]


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-5 * other.abs().max().clamp_min(1e-3))


def _small(parent: nn.Module) -> tuple[nn.Module | None, list[int]]:
    """(a copy of `parent` with linears of other sizes in the same ratios, and no parameters beside; features that it
    may take: none for experts, of which the gate alone is tried). None where there is no such copy.
    """
    copied = object.__new__(type(parent))
    copied.__dict__.update(parent.__dict__)
    if hasattr(parent, "_apply_gate"):
        copied._modules, copied._parameters = dict(parent._modules), {}
        return copied, []
    sizes = {name: size for name, child in parent.named_children() if (size := _size(child)) is not None}
    if len(sizes) < 2 or parent._parameters:
        return None, []
    whole = {feature for size in sizes.values() for feature in size}
    unit = math.gcd(*whole)
    if unit > 1 and unit == min(whole):
        unit //= 2
    if sum(out * into for out, into in sizes.values()) // unit**2 > _MOST:
        return None, []
    children: dict[str, nn.Module | None] = {}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        for name, child in parent.named_children():
            if name in sizes:
                out, into = sizes[name]
                children[name] = nn.Linear(into // unit, out // unit, bias=False, dtype=torch.float32)
            else:
                children[name] = nn.Identity() if any(True for _ in child.parameters()) else child
    for name, value in parent.__dict__.items():
        if isinstance(value, int) and not isinstance(value, bool) and value in whole:
            copied.__dict__[name] = value // unit
    copied._modules, copied._parameters = children, {}
    return copied, sorted({into // unit for _, into in sizes.values()})
