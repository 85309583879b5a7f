"""Calls with arguments that do not exist: said with the names that do, and what became of names of other frameworks."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from .argument_types import checks_of
from .errors import nearest

P = ParamSpec("P")
R = TypeVar("R")


def check_call(
    name: str,
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    advice: Mapping[str, str] | None = None,
) -> None:
    """ValueError for a call that `signature` cannot take. `advice` says more about some unknown names."""
    parameters = signature.parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    for unknown in () if inspect.Parameter.VAR_KEYWORD in kinds else kwargs.keys() - parameters.keys():
        said = (advice or {}).get(unknown)
        hint = f": {said}" if said else _nearest(unknown, parameters) or f"; it takes {', '.join(parameters)}"
        raise ValueError(f"{name} takes no argument {unknown}={kwargs[unknown]!r}{hint}")
    positional = [key for key, parameter in parameters.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and len(args) > len(positional):
        raise ValueError(
            f"{name} got {len(args)} positional arguments and takes at most {len(positional)}: give them by name "
            f"({', '.join(f'{key}=...' for key in (positional or list(parameters))[:3])})"
        )
    twice = [key for key in positional[: len(args)] if key in kwargs]
    if twice:
        raise ValueError(
            f"{name} got {twice[0]} twice: as positional argument {positional.index(twice[0]) + 1} and by "
            "name; give it once"
        )


def _nearest(unknown: str, known: Mapping[str, Any]) -> str:
    """The known name that begins with the unknown one, or else looks like it."""
    longer = [name for name in known if name.startswith(f"{unknown}_")]
    return f" - did you mean {longer[0]!r}?" if longer else nearest(unknown, known)


class ExplainedArguments(ABCMeta):
    """Metaclass of classes whose constructors explain which arguments they take; `argument_advice` of the class is
    said too.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """That of the constructor, for `help` and editors, which would show this metaclass's call."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        check_call(cls.__name__, cls.__signature__, args, kwargs, getattr(cls, "argument_advice", None))
        return super().__call__(*args, **kwargs)


def explained(advice: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Unknown keyword arguments are refused with the nearest name, or with what `advice` says of them; so are flags and
    numbers that came as text (see `argument_types`)."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(method)
        name = method.__qualname__
        names = tuple(signature.parameters)
        checks = checks_of(signature)

        @wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= signature.parameters.keys() or len(args) > len(names):
                check_call(name, signature, args, kwargs, advice)
            for key, value in (*zip(names, args, strict=False), *kwargs.items()):
                if key in checks:
                    checks[key](value)
            return method(*args, **kwargs)

        return call

    return decorate
