"""Where a computation waits for other ranks, another one of this rank can go on: the two take turns.

Collectives in forwards and backwards go through here. While nobody takes turns they are what they are in torch. Else
each is launched, the turn is passed on, and it is waited for when the turn comes back. Only one computes at any time
and the turn changes at collectives only, so launches come in the same order on all ranks that run the same two
computations, as every backend needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

BACKWARD_THREAD = "shardwright-backward"  # on which the second of two runs where a pipeline rank runs two
_pass_on: Callable[[], None] | None = None


class Waitable(Protocol):
    def wait(self) -> Any: ...


@contextmanager
def taken(pass_on: Callable[[], None]) -> Iterator[None]:
    """Inside, `pass_on` is called by whoever has launched a collective; it returns when its turn comes back."""
    global _pass_on
    assert _pass_on is None, "two computations take turns already"
    _pass_on = pass_on
    try:
        yield
    finally:
        _pass_on = None


def wait(work: Waitable, tensor: Tensor) -> Any:
    """`work.wait()`, for what has been launched asynchronously with `tensor`."""
    # A meta tensor moves nothing, and stands where a module is being asked for its shapes: no place to stop.
    if _pass_on is not None and not tensor.is_meta:
        _pass_on()
    return work.wait()


def run(collective: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
    """`collective(tensor, ...)`, done when this returns (on CUDA: what follows on the current stream comes behind
    it).
    """
    if _pass_on is None or tensor.is_meta:
        collective(tensor, *args, **kwargs)
        return
    work = collective(tensor, *args, async_op=True, **kwargs)
    if work is not None:
        wait(work, tensor)
