"""Who made a tensor, told by the functions that are running: which holds a peak."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..comm.compat import runs_backward

KEPT = "kept between steps"
_BACKWARD = "gradients inside of a backward"
_AGAIN = "recomputed layers"

# The end of a file's path, what it makes. The innermost that matches counts.
_FILES = (
    ("shardwright/zero/unit_gatherer.py", "gathered weights"),
    ("shardwright/zero/gather.py", "gathered weights"),
    ("shardwright/zero/reducer.py", "gradients on their way"),
    ("shardwright/zero/flight.py", "gradients on their way"),
    ("shardwright/zero/collectives.py", "gradients on their way"),
    ("shardwright/zero/bucket.py", "gradients on their way"),
    ("shardwright/zero/sharded_bucket.py", "gradients on their way"),
    ("shardwright/zero/optimizer.py", "optimizer step"),
    ("torch/optim/optimizer.py", "optimizer step"),
    ("shardwright/precision/grad_norm.py", "optimizer step"),
    ("shardwright/comm/p2p.py", "messages"),
    ("shardwright/pipeline/batch/ready.py", "the batch"),
    ("shardwright/pipeline/batch/microbatch.py", "the batch"),
)
_MOST_FRAMES = 80


class Holders:
    """Labels of new tensors.

    action  the one that the rank is at, None outside of a pipeline
    """

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self._part = "boost"

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Inside, the step is in this part of it."""
        before, self._part = self._part, name
        yield
        self._part = before

    def doing(self) -> str:
        """What the rank does now."""
        action = self._action()
        if action is not None:
            return str(action)
        if self._part == "forward and backward":
            return "backward" if runs_backward() else "forward"
        return self._part

    def label(self) -> str:
        """Of a tensor that is made now."""
        frame = sys._getframe(3)
        module: nn.Module | None = None
        known = ""
        for _ in range(_MOST_FRAMES):
            code = frame.f_code
            if not known:
                known = _of_file(code.co_filename)
            if code.co_name in ("recompute_fn", "recompute") and "checkpoint" in code.co_filename:
                return known or _AGAIN
            if module is None and code.co_argcount and code.co_varnames[0] == "self":
                names = frame.f_locals
                module = _own_module(names.get("self"))
                if type(names) is dict:  # before Python 3.13 a copy, which would keep what the frame lets go of
                    names.clear()
            if frame.f_back is None:
                break
            frame = frame.f_back
        if known:
            return known
        if runs_backward():
            return _BACKWARD
        return f"activations of {type(module).__name__}" if module is not None else "others"


_known_files: dict[str, str] = {}


def _of_file(name: str) -> str:
    found = _known_files.get(name)
    if found is None:
        found = _known_files[name] = next((what for end, what in _FILES if name.endswith(end)), "")
    return found


def _own_module(value: Any) -> nn.Module | None:
    """A module that is none of torch's own, nor of those that replace them."""
    if isinstance(value, nn.Module) and not type(value).__module__.startswith(("torch.", "shardwright.")):
        return value
    return None
