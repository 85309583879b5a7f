"""Who this process is, read from what started it: torchrun, srun, mpirun, or nothing at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of a job. `host` and `port` are where rank 0 listens; None for a job of one process."""

    rank: int
    world_size: int
    local_rank: int
    host: str | None
    port: int | None
    source: str  # what the numbers were read from, for messages


def detect(environ: Mapping[str, str] = os.environ) -> ProcessIdentity:
    """torchrun's variables first, then SLURM's, then OpenMPI's; without any of them this is a job of one process."""
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return from_torchrun(environ)
    if "SLURM_PROCID" in environ and _slurm_tasks(environ) is not None:
        return from_slurm(environ)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return from_openmpi(environ)
    return ProcessIdentity(0, 1, 0, None, None, "plain python")


def from_torchrun(environ: Mapping[str, str] = os.environ) -> ProcessIdentity:
    rank, world = _number(environ, "RANK", "torchrun"), _number(environ, "WORLD_SIZE", "torchrun")
    return ProcessIdentity(
        rank,
        world,
        int(environ.get("LOCAL_RANK", rank)),
        environ.get("MASTER_ADDR", "127.0.0.1"),
        int(environ.get("MASTER_PORT", DEFAULT_PORT)),
        "torchrun",
    )


def from_slurm(
    environ: Mapping[str, str] = os.environ, host: str | None = None, port: int | None = None
) -> ProcessIdentity:
    """srun's variables. Rank 0's host is MASTER_ADDR or the first node of the step; the port follows from the job
    id.
    """
    rank = _number(environ, "SLURM_PROCID", "srun")
    world = _slurm_tasks(environ)
    if world is None:
        raise ValueError("SLURM_NTASKS is not set: start the script with srun, or use launch_from_torch under torchrun")
    nodes = (
        environ.get("SLURM_STEP_NODELIST")
        or environ.get("SLURM_JOB_NODELIST")
        or environ.get("SLURM_NODELIST")
        or "127.0.0.1"
    )
    if port is None:
        port = (
            int(environ["MASTER_PORT"])
            if "MASTER_PORT" in environ
            else 15000 + int(environ.get("SLURM_JOB_ID", "0")) % 20000
        )
    return ProcessIdentity(
        rank,
        world,
        int(environ.get("SLURM_LOCALID", rank)),
        host or environ.get("MASTER_ADDR") or first_host(nodes),
        port,
        "srun",
    )


def from_openmpi(
    environ: Mapping[str, str] = os.environ, host: str | None = None, port: int | None = None
) -> ProcessIdentity:
    rank = _number(environ, "OMPI_COMM_WORLD_RANK", "mpirun")
    world = _number(environ, "OMPI_COMM_WORLD_SIZE", "mpirun")
    return ProcessIdentity(
        rank,
        world,
        int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK", rank)),
        host or environ.get("MASTER_ADDR", "127.0.0.1"),
        port or int(environ.get("MASTER_PORT", DEFAULT_PORT)),
        "mpirun",
    )


def first_host(nodes: str) -> str:
    """First host of a SLURM node list: `gpu[003-006,9],cpu1` -> `gpu003`."""
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", nodes.strip())
    if match is None:
        raise ValueError(f"SLURM node list {nodes!r} names no host; set MASTER_ADDR to the host of rank 0")
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + (suffix or "")


def _slurm_tasks(environ: Mapping[str, str]) -> int | None:
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        if name in environ:
            return int(environ[name])
    return None


def _number(environ: Mapping[str, str], name: str, launcher: str) -> int:
    value = environ.get(name)
    if value is None:
        raise ValueError(
            f"environment variable {name} is not set: this launch function expects to be started by {launcher}"
        )
    return int(value)
