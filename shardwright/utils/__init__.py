"""Small helpers that know nothing of parallelism."""

from typing import Any

from .._moved import missing_name
from .device import get_current_device
from .random import set_seed

__all__ = ["get_current_device", "set_seed"]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
