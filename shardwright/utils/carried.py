"""Facts about a running forward that its modules leave for those behind them, and find again when they are recomputed.

They are kept by thread. Activation checkpointing calls a part of a forward again in backward, when other forwards may
have run since: `carried` lets that call see what the first one saw.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_of_thread = threading.local()


def facts() -> dict[Hashable, Any]:
    """Those of the forward that runs in this thread; write to it to leave one."""
    if not hasattr(_of_thread, "facts"):
        _of_thread.facts = {}
    found: dict[Hashable, Any] = _of_thread.facts
    return found


@contextmanager
def holding(known: Mapping[Hashable, Any]) -> Iterator[None]:
    """Inside, these are the facts; what is left meanwhile is gone afterwards."""
    before = facts()
    _of_thread.facts = dict(known)
    try:
        yield
    finally:
        _of_thread.facts = before


def carried(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose first call is an ordinary one and whose later ones see the facts that the first one saw."""
    known = dict(facts())
    is_first = True

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return function(*args, **kwargs)
        with holding(known):
            return function(*args, **kwargs)

    return call
