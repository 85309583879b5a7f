"""Real processes as srun, or torchrun, starts them, and how they end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

PATIENCE = float(os.environ.get("SHARDWRIGHT_PATIENCE", "1"))  # of tests that run beside other work
LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_",
    "OMPI_",
    "TORCHELASTIC_",
)


@dataclass(frozen=True)
class Ended:
    """codes of the processes by rank, what each printed, and seconds from `fault` (or the start) to the last end."""

    codes: list[int]
    printed: list[str]
    seconds: float


def environment(**extra: str) -> dict[str, str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {**plain, "OMP_NUM_THREADS": "1", "TORCH_DISTRIBUTED_DEBUG": "OFF", **extra}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(arguments: list[str], directory: Path, world: int = 2, limit: float = 120, **extra: str) -> Ended:
    """`python arguments` on `world` ranks, as srun would start them; killed after `limit` seconds."""
    port = str(free_port())
    started = []
    begun = time.monotonic()
    for rank in range(world):
        variables = environment(
            SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NTASKS=str(world), MASTER_PORT=port, **extra
        )
        variables["SLURM_NODELIST"] = "localhost"
        with open(directory / f"out-{rank}", "w") as output:
            started.append(
                subprocess.Popen([sys.executable, *arguments], env=variables, stdout=output, stderr=subprocess.STDOUT)
            )
    while any(process.poll() is None for process in started) and time.monotonic() - begun < limit * PATIENCE:
        time.sleep(0.05)
    ended = time.time()
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
    marks = [path.stat().st_mtime for path in directory.glob("rank-*")]
    since = max(marks) if marks else ended - (time.monotonic() - begun)
    return Ended(
        [process.returncode for process in started],
        [(directory / f"out-{rank}").read_text() for rank in range(world)],
        ended - since,
    )
