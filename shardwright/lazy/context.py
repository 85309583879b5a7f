"""Build a model without its weights: parameters on the meta device, and a note on each of how to make it.

    with LazyInitContext():
        model = AutoModelForCausalLM.from_config(config)          # or from_pretrained(local_directory), or any
                                                                  nn.Module

Every parameter that a constructor registers moves to the meta device at once. What happens to it afterwards
(`reset_parameters`, transformers' `_init_weights`, any in-place call) is written down on it instead of being done;
`lazy.weights` later replays the notes of one parameter at a time, seeded by the parameter's name, and keeps this rank's
slice. So the distribution is the constructor's own, and the values do not depend on the layout or on the order of
construction.

Buffers are computed for real: they are small and their values (rotary frequencies, position ids) often come from
arithmetic. So do parameters that are built from values rather than filled (`nn.Parameter(torch.randn(...) * 0.02)`): up
to 65536 numbers are noted down, larger ones stay real and are sharded as in a model that was not built lazily.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .notes import Alias, Notes, Step, alias_of, notes_of, set_alias, set_notes
from .weights import LazyWeights

_SMALL = 65536

_IN_PLACE_OPERATORS = frozenset(("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"))
_ALIASING = frozenset(
    (
        "__get__",
        "detach",
        "__getitem__",
        "view",
        "t",
        "transpose",
        "narrow",
        "select",
        "chunk",
        "split",
        "unbind",
        "squeeze",
        "unsqueeze",
    )
)
_WITHOUT_VALUES = frozenset(("requires_grad_", "share_memory_", "detach_", "rename_"))
_OVERWRITING = frozenset(("normal_", "uniform_", "zero_", "fill_", "copy_", "exponential_", "bernoulli_"))


class LazyInitContext:
    """Modules built inside have their parameters on the meta device; sharding materialises this rank's slices.

    seed            of the weights that are not read from a checkpoint; default: the seed torch was last given, which
                    must be the same on all ranks
    default_device  where `materialize` puts the model; default: the CPU

    `from_pretrained` of transformers models reads nothing inside either; it must be given a local directory with
    safetensors files, from which each rank later reads its own slices.
    """

    def __init__(self, *, seed: int | None = None, default_device: torch.device | str | None = None) -> None:
        self.seed = seed
        self.default_device = default_device
        self._stack = ExitStack()

    def __enter__(self) -> LazyInitContext:
        seed = torch.initial_seed() if self.seed is None else self.seed
        with ExitStack() as stack:
            recorder = stack.enter_context(_Recorder(seed, self.default_device))
            stack.enter_context(
                _patched(nn.Module, "register_parameter", _registering(nn.Module.register_parameter, recorder))
            )
            for name in [name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")]:
                stack.enter_context(_patched(nn.init, name, _noting(getattr(nn.init, name))))
            if "transformers" in sys.modules:
                # Not at module level: it imports transformers, and a script that has not builds none of its models.
                from .from_pretrained import lazy_transformers

                stack.enter_context(lazy_transformers(_noting))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Make all weights of a model that is not going to be sharded; returns `module`."""
        weights = LazyWeights.of(module)
        if weights is not None:
            made = weights.materialize(module)
            if verbose:
                print(f"materialised {made} parameters of {type(module).__name__}")
        return module


class _Recorder(TorchFunctionMode):
    """Notes in-place calls on lazy parameters and remembers what fresh tensors are filled with."""

    def __init__(self, seed: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.seed, self.device = seed, device
        # The latest factory results with their fill (None: uninitialised). Held, so that no other tensor can take over
        # their memory.
        self._fresh: deque[tuple[Tensor, float | None]] = deque(maxlen=16)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _FACTORIES:
            result = func(*args, **kwargs)
            if not result.is_meta and "out" not in kwargs:
                self._fresh.append((result, _FACTORIES[func](args, kwargs)))
            return result
        in_place = name in _IN_PLACE_OPERATORS or (
            name.endswith("_") and not name.startswith("_") and name not in _WITHOUT_VALUES
        )
        place: int | str = "out" if "out" in kwargs else "tensor" if "tensor" in kwargs else 0
        target = kwargs.get(str(place)) if place else (args[0] if args else None)
        if (in_place or place == "out") and isinstance(target, Tensor):
            alias = alias_of(target)
            if alias is None:
                self._forget(target)
                return func(*args, **kwargs)
            whole = place == "out" or name in _OVERWRITING or getattr(func, "__module__", "") == "torch.nn.init"
            _note(alias, func, place, args, kwargs, whole)
            return target
        result = func(*args, **kwargs)
        if name in _ALIASING and args and isinstance(args[0], Tensor) and (alias := alias_of(args[0])) is not None:
            _tag(result, alias, func, name, args, kwargs)
        return result

    def fill_of(self, tensor: Tensor) -> tuple[bool, float | None]:
        """(known, fill) of a tensor that came from a factory and was not written to since."""
        for fresh, fill in reversed(self._fresh):
            if fresh.data_ptr() == tensor.data_ptr() and fresh.shape == tensor.shape and tensor.numel():
                return True, fill
        return False, None

    def _forget(self, written: Tensor) -> None:
        if not written.is_meta and self._fresh:
            pointer = written.untyped_storage().data_ptr()
            kept = [entry for entry in self._fresh if entry[0].untyped_storage().data_ptr() != pointer]
            self._fresh = deque(kept, maxlen=self._fresh.maxlen)


_FACTORIES: dict[Callable[..., Any], Callable[[Sequence[Any], dict[str, Any]], float | None]] = {
    torch.empty: lambda args, kwargs: None,
    torch.empty_like: lambda args, kwargs: None,
    torch.zeros: lambda args, kwargs: 0.0,
    torch.zeros_like: lambda args, kwargs: 0.0,
    torch.ones: lambda args, kwargs: 1.0,
    torch.ones_like: lambda args, kwargs: 1.0,
    torch.full: lambda args, kwargs: float(kwargs["fill_value"] if "fill_value" in kwargs else args[1]),
}


def _tag(
    result: Any, alias: Alias, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Remember that `result` (or each tensor of it) is a view of a lazy parameter."""
    rest = tuple(args[1:])

    def view(target: Any) -> Any:
        return func(target, *rest, **kwargs)

    whole = (
        alias.whole
        and name in ("__get__", "detach")
        and isinstance(result, Tensor)
        and tuple(result.shape) == alias.notes.shape
    )
    if isinstance(result, Tensor) and result.is_meta:
        set_alias(result, Alias(alias.notes, (*alias.path, view), whole))
    elif isinstance(result, (tuple, list)):
        for number, part in enumerate(result):
            if isinstance(part, Tensor):
                set_alias(part, Alias(alias.notes, (*alias.path, view, operator.itemgetter(number)), False))


def _note(
    alias: Alias,
    func: Callable[..., Any],
    place: int | str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    overwrites: bool,
) -> None:
    others = [arg for key, arg in [*enumerate(args), *kwargs.items()] if key != place and isinstance(arg, Tensor)]
    obstacle = (
        (f"is initialised from other lazy tensors by {func.__name__}")
        if any(other.is_meta for other in others)
        else None
    )
    kept_args = tuple(None if key == place else arg for key, arg in enumerate(args))
    kept_kwargs = {key: arg for key, arg in kwargs.items() if key != place}
    alias.notes.add(Step(func, place, kept_args, kept_kwargs, alias.path), overwrites and alias.whole, obstacle)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `torch.nn.init` that notes its call on lazy parameters; some do nothing, others too much, with a
    meta tensor.
    """

    def init(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs["tensor"]
        alias = alias_of(tensor)
        if alias is None:
            return function(*args, **kwargs)
        place = 0 if args else "tensor"
        _note(alias, function, place, args, kwargs, True)
        return tensor

    return init


def _registering(original: Callable[..., None], recorder: _Recorder) -> Callable[..., None]:
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and notes_of(param) is None:
            _make_lazy(param, recorder)
        original(module, name, param)

    return register_parameter


@torch.no_grad()
def _make_lazy(param: nn.Parameter, recorder: _Recorder) -> None:
    """Move `param`, the object itself, to the meta device, with notes of its value so far."""
    notes = Notes(tuple(param.shape), param.dtype, recorder.seed, recorder.device)
    if param.is_meta:
        notes.obstacle = "is computed from other lazy tensors (a parametrization)"
    else:
        known, fill = recorder.fill_of(param)
        if known and fill is not None:
            notes.add(Step(Tensor.fill_, 0, (None, fill), {}), True)
        elif not known:
            if math.prod(param.shape) > _SMALL:
                return
            notes.add(Step(Tensor.copy_, 0, (None, param.detach().clone()), {}), True)
        lazy = nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
        )
        lazy.__dict__.update(param.__dict__)
        torch.utils.swap_tensors(param, lazy)
    set_notes(param, notes)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
