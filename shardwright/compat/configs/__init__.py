"""Configurations of other frameworks, read into what a recipe says, and written from it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .found import Found, Note

if TYPE_CHECKING:
    from .files import SOURCES, read_file
    from .writers import TARGETS, write

# What needs torch, which a mistake in a recipe is not kept waiting for.
_HOMES = {"SOURCES": "files", "read_file": "files", "TARGETS": "writers", "write": "writers"}

__all__ = ["SOURCES", "TARGETS", "Found", "Note", "read_file", "write"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
