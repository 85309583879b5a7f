"""One time for the ranks of a pipeline: ranks of one machine read one clock, those of several compare theirs.

In an all-gather nobody is through before everybody has begun. So what rank 0 read before it bounds from below what
rank r reads behind it, and the other way round:

    begun_r - through_0  <=  clock_r - clock_0  <=  through_r - begun_0

Several rounds, in which each rank in turn comes late, leave an interval of about the time of a message; its middle is
taken.
"""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ..comm.collectives import all_gather, gather_sizes

_ROUNDS = 4  # per rank
_LATE = 1e-3  # seconds, longer than ranks are apart behind a collective
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def ahead_of_first(
    group: dist.ProcessGroup,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    machine: int | None = None,
) -> float:
    """Seconds that this rank's clock is ahead of that of the group's first rank. Collective.

    machine   a number that ranks with one clock share; left out: that of the running system
    """
    machines = gather_sizes(_machine() if machine is None else machine, group, device)
    if len(set(machines)) == 1:
        return 0.0
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def gathered(*nanoseconds: int) -> list[int]:
        found: list[int] = all_gather(torch.tensor(nanoseconds, device=device), group).tolist()
        return found

    most, least = 2**62, [-(2**62)] * size
    for turn in range(_ROUNDS * size):
        if turn % size == rank:
            time.sleep(_LATE)
        begun = gathered(round(1e9 * clock()))
        through = round(1e9 * clock())
        most = min(most, through - begun[0])
        least = [max(bound, each - through) for bound, each in zip(least, begun, strict=True)]
    known = gathered(*least)[rank]  # as rank 0 has seen it
    return 0.0 if rank == 0 else (known + most) / 2e9


def _machine() -> int:
    """The same for all processes that were started since the machine was."""
    name = _BOOT.read_text() if _BOOT.exists() else socket.gethostname()
    return zlib.crc32(name.encode())
