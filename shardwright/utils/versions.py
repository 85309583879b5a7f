"""Versions of what decides on the numbers of a run."""

from __future__ import annotations

import importlib.metadata
import platform

from .._version import __version__


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    found = {name: package_version(name) or "not installed" for name in ("torch", "transformers")}
    return {"shardwright": __version__, **found, "python": platform.python_version()}
