"""Building models without their weights."""

from __future__ import annotations

from shardwright.shardformer.lazy import LazyInitContext

__all__ = ["LazyInitContext"]
