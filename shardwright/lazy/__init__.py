"""Building models without their weights."""

from __future__ import annotations

from .context import LazyInitContext

__all__ = ["LazyInitContext"]
