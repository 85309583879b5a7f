"""Loggers that say which rank speaks, and let some ranks speak only."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch.distributed as dist

_FORMAT = "%(asctime)s %(name)s %(levelname)s %(message)s"


class DistributedLogger:
    """A `logging.Logger` whose messages begin with the rank; `ranks=[0]` lets only those ranks print."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)
        self.logger.propagate = False
        if not self.logger.handlers:
            self._add(logging.StreamHandler())
            self.logger.setLevel(logging.INFO)

    def set_level(self, level: str) -> None:
        """ "DEBUG", "INFO", "WARNING" or "ERROR"."""
        known = ("DEBUG", "INFO", "WARNING", "ERROR")
        if level.upper() not in known:
            raise ValueError(f"level={level!r} is not one of {', '.join(map(repr, known))}")
        self.logger.setLevel(level.upper())

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write to `path`/rank_<rank>[_<suffix>].log; the directory is made if it is not there."""
        directory = Path(path)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"rank_{_rank()}" if suffix is None else f"rank_{_rank()}_{suffix}"
        handler = logging.FileHandler(directory / f"{name}.log", mode=mode)
        handler.setLevel(level.upper())
        self._add(handler)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.DEBUG, message, ranks)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        self._log(logging.ERROR, message, ranks)

    def _add(self, handler: logging.Handler) -> None:
        handler.setFormatter(logging.Formatter(_FORMAT))
        self.logger.addHandler(handler)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or _rank() in ranks:
            self.logger.log(level, "[rank %d] %s", _rank(), message)


@cache
def get_dist_logger(name: str = "shardwright") -> DistributedLogger:
    """The logger of this name, always the same object."""
    return DistributedLogger(name)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("shardwright",)) -> None:
    """Silence everything below an error of the loggers that exist by now: all of them or those in `include`, never
    those in `exclude`.
    """
    for name in list(logging.root.manager.loggerDict) if include is None else include:
        if name not in exclude:
            logging.getLogger(name).setLevel(logging.ERROR)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
