"""Which module and which line of Python an operator belongs to, while a step is looked at: in the forward those that
run, in the backward those that made the node.
"""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_ENGINE = "_engine_run_backward"
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)\n(?:    (?P<source>\S.*)\n)?', re.M)


class Places:
    """Of one model. Nodes of the backward are numbered in the order in which the forward makes them, so the modules
    that ran then are known by ranges of numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._running: list[tuple[nn.Module, int]] = []
        self._ranges: list[tuple[int, int, str]] = []  # first, behind the last, module

    @contextmanager
    def watching(self) -> Iterator[None]:
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that this is slow
                with torch.autograd.detect_anomaly(check_nan=False):  # nodes note where they were made
                    yield
        finally:
            before.remove()
            after.remove()
            self._ranges.clear()
            self._running.clear()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self._running.append((module, _number()))

    def _leave(self, module: nn.Module, *_: Any) -> None:
        while self._running:  # down to this one: others were left by an exception
            last, first = self._running.pop()
            name = self._name(last)
            if name:
                self._ranges.append((first, _number(), name))
            if last is module:
                return

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(id(module))
        return f"{name} ({type(module).__name__.removeprefix('FSDP')})" if name else ""

    def here(self) -> tuple[bool, str, str]:
        """(whether in the backward, module, line) of the operator that is called now."""
        frames = _frames(sys._getframe(1))
        node = _node()
        in_engine = next((depth for depth, frame in enumerate(frames) if frame.f_code.co_name == _ENGINE), None)
        backward = node is not None or in_engine is not None
        inner = frames if in_engine is None else frames[:in_engine]
        line = _line_of(inner)
        running = next((name for module, _ in reversed(self._running) if (name := self._name(module))), "")
        if not backward or (self._running and line):  # an activation that is computed once more
            return backward and not self._running, running, line or _line_of(inner, everything=True)
        return True, self._module_of(node), line or _line_of_node(node) or _line_of(inner, everything=True)

    def _module_of(self, node: Any) -> str:
        number = _number_of(node)
        within = [(last - first, name) for first, last, name in self._ranges if first <= number < last]
        return min(within)[1] if within else ""


def _number() -> int:
    """Of the next node. Checked on torch 2.13: no public name."""
    return int(torch.autograd._get_sequence_nr())


def _node() -> Any:
    """The node whose backward runs. Checked on torch 2.13: no public name."""
    return torch._C._current_autograd_node()


def _number_of(node: Any) -> int:
    return int(node._sequence_nr()) if node is not None else -1


def _frames(frame: FrameType | None) -> list[FrameType]:
    """Innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _line_of(frames: list[FrameType], everything: bool = False) -> str:
    """The innermost line that is neither torch's nor, unless there is no other, this package's."""
    here = str(Path(__file__).parent)
    for frame in frames:
        file = frame.f_code.co_filename
        if file.startswith((_TORCH, here, "<")) or (file.startswith(_PACKAGE) and not everything):
            continue
        return _told(file, frame.f_lineno, frame.f_code.co_name)
    return ""


def _line_of_node(node: Any) -> str:
    """Where the forward made a node of the backward."""
    text = "".join(node.metadata.get("traceback_", ())) if node is not None else ""
    found = [
        each for each in _FRAME.finditer(text) if not each["file"].startswith((_TORCH, str(Path(__file__).parent), "<"))
    ]
    own = [each for each in found if not each["file"].startswith(_PACKAGE)]
    if not found:
        return ""
    last = (own or found)[-1]
    return _told(last["file"], int(last["line"]), last["name"])


def _told(file: str, line: int, name: str) -> str:
    source = linecache.getline(file, line).strip()[:100]
    return f"{Path(file).name}:{line} {name}" + (f": {source}" if source else "")
