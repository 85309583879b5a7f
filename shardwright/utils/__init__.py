"""Small helpers that know nothing of parallelism.

Names are looked up when they are first used: some helpers are there for what must answer before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .._moved import missing_name

if TYPE_CHECKING:
    from .device import get_current_device
    from .random import set_seed

_HOMES = {"get_current_device": "device", "set_seed": "random"}

__all__ = ["get_current_device", "set_seed"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise missing_name(__name__, name)
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value
