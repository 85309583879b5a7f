"""Two computations at once, in this process and in a copy of it.

first, second = both(lambda: ..., lambda: ...)

A copy of a process has one thread, and no device. So there is one only where this process has no other threads of
Python's and has not touched a device; what a copy could not do, and where there is none, is done here, one after the
other.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

_First = TypeVar("_First")
_Second = TypeVar("_Second")


class _Copy(NamedTuple):
    pid: int
    answer: int  # file descriptor


def both(first: Callable[[], _First], second: Callable[[], _Second]) -> tuple[_First, _Second]:
    """What they return, which must be something to pickle for `second`."""
    copy = _start(second) if _may_copy() else None
    try:
        found = first()
    except BaseException:
        if copy is not None:
            os.kill(copy.pid, signal.SIGKILL)
            _answer(copy)
        raise
    answer = b"" if copy is None else _answer(copy)
    return found, pickle.loads(answer) if answer else second()


def _may_copy() -> bool:
    return (
        hasattr(os, "sched_getaffinity")  # on Linux
        and len(os.sched_getaffinity(0)) > 1
        and threading.active_count() == 1
        and not torch.cuda.is_initialized()
    )


def _start(work: Callable[[], Any]) -> _Copy:
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 counts threads of libraries; those that wait for work do not mind a copy that has none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        os.close(sending)
        return _Copy(pid, receiving)
    answer = b""
    try:
        torch.set_num_threads(1)  # OpenMP's other threads are not here, and it would wait for them for ever
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)  # what there is to say is said by the original
        answer = pickle.dumps(work())
    finally:
        with os.fdopen(sending, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)  # whatever happened, nothing of the original's is cleaned up here


def _answer(copy: _Copy) -> bytes:
    """Empty where it could not do its work."""
    with os.fdopen(copy.answer, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(copy.pid, 0)
    return answer
