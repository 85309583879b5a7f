"""Loggers under the name that scripts of Colossal-AI expect."""

from __future__ import annotations

from collections.abc import Sequence

from ...logging import DistributedLogger as NativeLogger
from ...logging import disable_existing_loggers as disable
from ...logging import get_dist_logger as get


class DistributedLogger(NativeLogger):
    @staticmethod
    def get_instance(name: str) -> NativeLogger:
        return get(name)


def get_dist_logger(name: str = "colossalai") -> NativeLogger:
    return get(name)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("colossalai",)) -> None:
    """Those of this package stay, too: its warnings say what a layout has no use for."""
    disable(include, [*exclude, "shardwright"])
