"""Keep double precision where models ask for single precision.

transformers casts to float32 in norms, softmax and losses, whatever the model's dtype. A float64 model then computes
its loss in float32, and a comparison to 1e-10 sees the order of float32 sums (microbatches, vocabulary shards) instead
of errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

# Whatever casts its first argument, by itself or through `dtype`. The functions themselves are replaced, because a
# torch function mode is not active while a checkpointed forward is recomputed inside backward.
_CASTING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.Tensor, ("float", "to", "type", "softmax", "log_softmax", "sum", "mean", "cumsum")),
    (torch, ("softmax", "log_softmax", "sum", "mean", "cumsum", "zeros_like")),
    (functional, ("softmax", "log_softmax")),
)
# What refuses operands of two dtypes, one of which was kept (transformers 5.17 multiplies rotary frequencies with
# positions; GLM-4V's tower reads its table of positions at single precision coordinates).
_MULTIPLYING: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (torch.Tensor, ("__matmul__", "matmul", "bmm")),
    (torch, ("matmul", "bmm")),
    (functional, ("grid_sample",)),
)
# What makes a float32 of a number, which may be the least one of float64 (masks that are made of `finfo(...).min`).
_FILLING: tuple[tuple[Any, tuple[str, ...]], ...] = ((torch, ("full", "tensor")),)
_LARGEST = torch.finfo(torch.float32).max
_depth = 0


@contextmanager
def keep_float64() -> Iterator[None]:
    """Inside, a float64 tensor stays float64 when it is cast to float32 (`.float()`, `.to(torch.float32)`,
    `softmax(dtype=torch.float32)`).

    Use it around forward, backward and step, on the reference and on the parallel side alike:

        with keep_float64():
            loss = model(**inputs).loss
            loss.backward()

    It holds for the whole process, for recomputed forwards too.
    """
    global _depth
    originals = []
    if not _depth:
        with torch.device("cpu"):
            torch.empty(0)  # torch lists what makes tensors at its first call like this: it must not list what follows
        for table, change in ((_CASTING, _keeping), (_MULTIPLYING, _promoting), (_FILLING, _widening)):
            for home, name in ((home, name) for home, names in table for name in names):
                originals.append((home, name, vars(home).get(name)))
                setattr(home, name, change(getattr(home, name)))
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        for home, name, own in originals:
            if own is None:
                delattr(home, name)  # inherited from torch's C base class
            else:
                setattr(home, name, own)


@functools.cache  # dynamo knows functions of torch by what they were when it first looked
def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def keep(*args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if function.__name__ == "float":
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return function(*args, **kwargs)

    return keep


@functools.cache
def _promoting(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def promote(first: torch.Tensor, second: torch.Tensor, **kwargs: Any) -> Any:
        if {first.dtype, second.dtype} == {torch.float32, torch.float64}:
            first, second = first.double(), second.double()
        return function(first, second, **kwargs)

    return promote


@functools.cache
def _widening(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def widen(*args: Any, **kwargs: Any) -> Any:
        value = kwargs.get("fill_value", args[-1] if args else None)
        if isinstance(value, float) and _LARGEST < abs(value) < float("inf") and kwargs.get("dtype") is None:
            kwargs = {**kwargs, "dtype": torch.float64}
        return function(*args, **kwargs)

    return widen
