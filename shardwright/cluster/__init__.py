"""Processes: launching them, naming their axes, coordinating them."""

from typing import Any

from .._moved import missing_name
from .coordinator import DistCoordinator
from .errors import BrokenJobError, JobError
from .launch import get_default_parser, launch, launch_from_openmpi, launch_from_slurm, launch_from_torch
from .mesh import ParallelMesh
from .recovery import recover

__all__ = [
    "BrokenJobError",
    "DistCoordinator",
    "JobError",
    "ParallelMesh",
    "get_default_parser",
    "launch",
    "launch_from_openmpi",
    "launch_from_slurm",
    "launch_from_torch",
    "recover",
]


def __getattr__(name: str) -> Any:
    raise missing_name(__name__, name)
