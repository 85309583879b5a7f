"""The names of `auto` where policies written for other frameworks look for them."""

from __future__ import annotations

from .auto import get_autopolicy

__all__ = ["get_autopolicy"]
