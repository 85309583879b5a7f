"""Versions of what decides on the numbers of a run."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

from .._version import __version__


def package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_installed(name: str) -> bool:
    """Whether a package can be imported. A directory of that name where ranks are started, such as the `wandb` that its
    runs leave or one with `datasets`, is importable, too, and none.
    """
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def versions() -> dict[str, str]:
    found = {name: package_version(name) or "not installed" for name in ("torch", "transformers")}
    return {"shardwright": __version__, **found, "python": platform.python_version()}
