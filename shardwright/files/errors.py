"""What can be wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; `failed_rank` is the rank that could not, where it was one and not
    all.
    """

    def __init__(self, message: str, failed_rank: int | None = None) -> None:
        super().__init__(message)
        self.failed_rank = failed_rank


class CheckpointNotFound(CheckpointError):
    """There is no checkpoint where one was asked for."""


class CheckpointDamaged(CheckpointError):
    """A file of a checkpoint is missing, cut short or altered; `file` is which."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file} {problem}")
        self.file = file


class UnsafeCheckpoint(ValueError):
    """A checkpoint names files outside its directory, or describes tensors that its files cannot hold."""


class CheckpointMismatch(ValueError):
    """A checkpoint does not fit the model or the optimizer.

    missing     names that the model has and the checkpoint lacks
    unexpected  names in the checkpoint that the model does not have
    mismatched  names whose shapes differ, with both shapes
    remedy      what to do about it
    """

    def __init__(
        self,
        where: Path,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        what: str = "model",
        remedy: str = "",
    ) -> None:
        self.missing, self.unexpected, self.mismatched = list(missing), list(unexpected), list(mismatched)
        lines = [f"{where} does not fit the {what}:"]
        for title, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched)):
            if names:
                more = f" and {len(names) - 10} more" if len(names) > 10 else ""
                lines.append(f"  {len(names)} {title}: {', '.join(names[:10])}{more}")
        super().__init__("\n".join([*lines, remedy] if remedy else lines))
