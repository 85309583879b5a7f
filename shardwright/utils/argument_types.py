"""Types of arguments, read from the annotations of the dataclass or function that takes them.

Scripts get their sizes from command lines, environment variables and JSON, where a number easily arrives as "2", 2.0 or
True. Each of these would work in some places and fail, or mean something else, in others; so each is refused by name
before anything else looks at it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def check_types(home: type, values: Mapping[str, Any]) -> None:
    """Refuse values that are not of the type that the field of dataclass `home` is annotated with."""
    for field in fields(home):
        _check(field.name, str(field.type), values[field.name])


def check_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """The same for keyword arguments of a function."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name in values:
            _check(name, str(parameter.annotation), values[name])


def checks_of(signature: inspect.Signature) -> dict[str, Callable[[Any], None]]:
    """What refuses wrong values of each argument that has a type to check."""
    return {
        name: partial(_check, name, str(parameter.annotation))
        for name, parameter in signature.parameters.items()
        if str(parameter.annotation).removesuffix(" | None") in _CHECKS
    }


def _check(name: str, annotation: str, value: Any) -> None:
    optional = annotation.endswith(" | None")
    check = _CHECKS.get(annotation.removesuffix(" | None"))
    if check is not None and not (optional and value is None):
        problem = check(value)
        if problem is not None:
            raise ValueError(f"{name}={value!r} must be {problem}{' or None' if optional else ''}")


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(value: Any) -> str | None:
    if isinstance(value, bool):
        return None
    said = str(value).lower()
    meant = "; use True" if said in _TRUE else "; use False" if said in _FALSE else ""
    return f"True or False{meant}"


def _whole(value: Any) -> str | None:
    if is_whole(value):
        return None
    number = _number_in(value)
    if number is None or math.isinf(number):
        return "a whole number"
    if number.is_integer():
        return f"a whole number (int); use {int(number)}"
    return f"a whole number; the nearest are {math.floor(number)} and {math.ceil(number)}"


def _number(value: Any) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return None
    number = _number_in(value)
    return "a number" + (f"; use {number:g}" if number is not None else "")


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a string"


def _whole_numbers(value: Any) -> str | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_whole, value)):
        return None
    return "a list of whole numbers, such as [4, 4]"


def _numbers(value: Any) -> str | None:
    if isinstance(value, Sequence) and not isinstance(value, str) and all(_number(number) is None for number in value):
        return None
    return "a list of numbers, such as [1.0, 1.5]"


def _number_or_numbers(value: Any) -> str | None:
    problem = _number(value)
    if problem is None or _numbers(value) is None:
        return None
    return f"{problem}, or a list of numbers"


def _number_in(value: Any) -> float | None:
    """The number that `value` was meant to be, if it says one."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


_CHECKS: dict[str, Callable[[Any], str | None]] = {
    "bool": _flag,
    "int": _whole,
    "float": _number,
    "str": _text,
    "list[int]": _whole_numbers,
    "list[float]": _numbers,
    "float | list[float]": _number_or_numbers,
}
