"""The device that a search or a page is about: one that was measured, else a published one."""

from __future__ import annotations

from pathlib import Path

from .calibration import calibrated, read
from .gpus import like_device
from .machines import Machine, machine


def device_of(
    calibration: str | Path | None,
    gpu: str | None,
    precision: str,
    world_size: int,
    *,
    memory: float | None = None,
    per_node: int | None = None,
    inside: float | None = None,
    between: float | None = None,
    own: tuple[str, float] | None = None,
) -> Machine:
    """memory in GiB, links in GB/s; `own` are name and GiB of the asking process's device, which counts where no `gpu`
    is given.
    """
    if calibration is None:
        if gpu is None:
            gpu, found = like_device(own)
            memory = found if memory is None else memory
        return machine(gpu, memory, per_node, inside, between, precision)
    measured = read(calibration)
    if own is not None and gpu is None and measured.device["name"] != own[0]:
        raise ValueError(
            f"calibration {calibration} is of another device, {measured.device['name']}, and this process has "
            f"{own[0]}; make it again here, with `shardwright calibrate -o FILE`"
        )
    return calibrated(
        measured, precision, world_size, gpu=gpu, memory=memory, per_node=per_node, inside=inside, between=between
    )
