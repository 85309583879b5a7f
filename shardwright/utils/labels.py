"""Names of what a step does, in the traces of torch's profiler, and of nsys under `torch.autograd.profiler.emit_nvtx`.

    with label("publish weights"): ...
    @labelled(lambda self, unit: f"gather {unit.name}")       of the arguments of each call

They cost a look at a flag while nobody profiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_nothing = nullcontext()


def is_profiling() -> bool:
    """Whether a profiler of torch records. The flag has no public name (torch 2.11 to 2.13)."""
    return torch.autograd.profiler._is_profiler_enabled


def label(what: str) -> AbstractContextManager[Any]:
    """Inside, the profiler says that `what` is being done."""
    return torch.profiler.record_function(what) if is_profiling() else _nothing


def labelled(name: str | Callable[..., str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Of all calls of a function; `name` may say it of their arguments."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not is_profiling():
                return function(*args, **kwargs)
            with torch.profiler.record_function(name if isinstance(name, str) else name(*args, **kwargs)):
                return function(*args, **kwargs)

        return call

    return decorate
