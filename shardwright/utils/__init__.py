"""Small helpers that know nothing of parallelism."""

from .device import get_current_device
from .random import set_seed

__all__ = ["get_current_device", "set_seed"]
