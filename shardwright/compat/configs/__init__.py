"""Configurations of other frameworks, read into what a recipe says, and written from it."""

from __future__ import annotations

from .files import SOURCES, read_file
from .found import Found, Note
from .writers import TARGETS, write

__all__ = ["SOURCES", "TARGETS", "Found", "Note", "read_file", "write"]
