"""Whether devices have room for what a layout keeps between steps, told before anything is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ...utils.device import get_current_device
from ..memory_table import GRADIENTS, MASTERS, STATES, WEIGHTS, of_sharding
from .resolved import RankShape, ResolvedLayout, size

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def lack_of_memory(layout: ResolvedLayout, offloads: bool) -> Iterator[str]:
    """A warning where the fullest rank keeps more than its device has, or the ranks of this host more than it has.

    offloads  masters and states of the optimizer lie in host memory
    """
    if dist.get_backend() == "fake":  # nothing is made
        return
    device = get_current_device()
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        parts = {rank.rank: _parts(rank, offloads) for rank in layout.ranks}
        fullest = max(parts, key=lambda place: sum(parts[place].values()))
        whose = f"pipeline rank {fullest} keeps" if len(parts) > 1 else "a rank keeps"
        yield from _told(layout, whose, parts[fullest], found.total_memory, f"the {found.name} has")
    elif device.type == "cpu":
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", layout.world_size))
        kept = [_parts(rank, False) for rank in layout.ranks]
        mean = {name: sum(parts[name] for parts in kept) * ranks // len(kept) for name in kept[0]}
        whose = f"{ranks} ranks keep" if ranks > 1 else "a rank keeps"
        yield from _told(layout, whose, mean, host_memory(), "this host has")


def _parts(rank: RankShape, offloads: bool) -> dict[str, int]:
    kept = {WEIGHTS: rank.weights, GRADIENTS: rank.gradients, MASTERS: rank.masters, STATES: rank.states}
    return {**kept, MASTERS: 0, STATES: 0} if offloads else kept


def _told(layout: ResolvedLayout, whose: str, kept: dict[str, int], room: int, place: str) -> Iterator[str]:
    total = sum(kept.values())
    if total <= room:
        return
    held = ", ".join(f"{name} {size(amount)}" for name, amount in kept.items() if amount)
    less = [f"{saving.setting} {size(saving.frees)} less" for saving in of_sharding(kept, layout) if saving.frees]
    yield (
        f"this layout will not fit: {whose} {size(total)} of {layout.model} between steps ({held}), and {place} "
        f"{size(room)}, without activations. About: {', '.join(less)}. `shardwright plan --peak` tells what a step "
        "takes, `--search` finds a layout that fits"
    )


def host_memory() -> int:
    """Bytes that this process's host, or its container, has."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _LIMITS:
        try:
            found = min(found, int(path.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return found
