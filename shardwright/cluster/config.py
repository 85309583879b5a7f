"""The configuration that `launch` was given, kept for the plugin that is built later."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

_launched: dict[str, Any] = {}


def load_config(config: str | Path | Mapping[str, Any] | None) -> dict[str, Any]:
    """The configuration as a dict. A path names a Python file whose public top-level names are the entries."""
    if config is None:
        return {}
    if isinstance(config, str | Path):
        path = Path(config)
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(
                f"config={str(config)!r} must be a dict or an existing Python file (.py) with entries such as parallel "
                "= dict(...)"
            )
        names = runpy.run_path(str(path))
        loaded = {
            name: value
            for name, value in names.items()
            if not name.startswith("_") and not isinstance(value, ModuleType)
        }
    elif isinstance(config, Mapping):
        loaded = dict(config)
    else:
        raise ValueError(f"config={config!r} must be a dict or the path of a Python file, not {type(config).__name__}")
    parallel = loaded.get("parallel", {})
    if not isinstance(parallel, Mapping):
        raise ValueError(
            f"config['parallel']={parallel!r} must be a dict, for example dict(pipeline=1, "
            "tensor=dict(size=2, mode='1d'))"
        )
    return loaded


def set_launch_config(config: dict[str, Any]) -> None:
    _launched.clear()
    _launched.update(config)


def get_launch_config() -> dict[str, Any]:
    """The configuration given to the last `launch(config=...)`; empty without one."""
    return dict(_launched)
