"""Whether two criteria are the same: their code and all values that it reads."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any


def identity(criterion: Any) -> Hashable:
    """Equal for criteria that do the same: a function written anew in every step is one criterion."""
    if isinstance(criterion, types.FunctionType):
        cells = tuple(_content(cell) for cell in criterion.__closure__ or ())
        defaults = tuple(_identity_of_value(value) for value in criterion.__defaults__ or ())
        return (criterion.__code__, cells, defaults)
    if isinstance(criterion, types.MethodType):
        return (criterion.__func__.__code__, id(criterion.__self__))
    if isinstance(criterion, functools.partial):
        values = (*criterion.args, *criterion.keywords.values())
        return (
            identity(criterion.func),
            tuple(criterion.keywords),
            tuple(_identity_of_value(value) for value in values),
        )
    return None if criterion is None else id(criterion)


def _content(cell: Any) -> Hashable:
    try:
        return _identity_of_value(cell.cell_contents)
    except ValueError:  # not bound yet
        return None


def _identity_of_value(value: Any) -> Hashable:
    if callable(value):
        return identity(value)
    if isinstance(value, str | int | float | bool | None):
        return value
    return f"{type(value).__module__}.{type(value).__qualname__}"
