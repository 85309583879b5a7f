"""Real processes as srun, or torchrun, starts them, and how they end.

Ranks are forked from one process that has loaded torch and transformers, in place of each loading them, which would be
most of what they do. With SHARDWRIGHT_FORKED=0 they are `python script.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardwright.testing.ranks import fork_server
from tests.forked_scripts import run_script

FORKED = os.environ.get("SHARDWRIGHT_FORKED") != "0"
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


class Process(Protocol):
    """What runs a rank. `code` is None until it has ended."""

    @property
    def pid(self) -> int: ...

    def code(self) -> int | None: ...

    def kill(self) -> None: ...


class Started:
    """`python arguments`."""

    def __init__(self, arguments: list[str], variables: dict[str, str], output: Path) -> None:
        with open(output, "w") as file:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], env=variables, stdout=file, stderr=subprocess.STDOUT
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Forked:
    """The same of a process that has imported what scripts import."""

    def __init__(self, arguments: list[str], variables: dict[str, str], output: Path) -> None:
        output.touch()
        script, *options = arguments
        self._process = fork_server().Process(
            target=run_script, args=(Path(script), tuple(options), output.parent, output, variables)
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def code(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def start(arguments: list[str], variables: dict[str, str], output: Path) -> Process:
    return (Forked if FORKED else Started)(arguments, variables, output)


def run(arguments: list[str], directory: Path, world: int = 2, limit: float = 120, **extra: str) -> Ended:
    """`python arguments` on `world` ranks, as srun would start them; killed after `limit` seconds."""
    port = str(free_port())
    started: list[Process] = []
    begun = time.monotonic()
    for rank in range(world):
        variables = environment(
            SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank), SLURM_NTASKS=str(world), MASTER_PORT=port, **extra
        )
        variables["SLURM_NODELIST"] = "localhost"
        started.append(start(arguments, variables, directory / f"out-{rank}"))
    while any(process.code() is None for process in started) and time.monotonic() - begun < limit * PATIENCE:
        time.sleep(0.05)
    ended = time.time()
    for process in started:
        if process.code() is None:
            process.kill()
    marks = [path.stat().st_mtime for path in directory.glob("rank-*")]
    since = max(marks) if marks else ended - (time.monotonic() - begun)
    return Ended(
        [code for process in started if (code := process.code()) is not None],
        [(directory / f"out-{rank}").read_text() for rank in range(world)],
        ended - since,
    )
