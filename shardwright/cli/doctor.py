"""`shardwright doctor`: is this machine ready, and if not, what would make it so."""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from typing import NamedTuple

from ..utils.versions import package_version

HELP = "check that this machine can train, and say how to fix what cannot"


class Check(NamedTuple):
    """`required` checks decide the exit status; `fix` is printed when `passed` is false."""

    name: str
    passed: bool
    found: str
    fix: str
    required: bool = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> int:
    failed = 0
    for check in checks():
        verdict = "ok  " if check.passed else "FAIL" if check.required else "note"
        failed += check.required and not check.passed
        print(f"{verdict}  {check.name:<22} {check.found}")
        if not check.passed:
            print(f"      -> {check.fix}")
    print(f"\n{failed} problem(s) to fix." if failed else "\nReady to train.")
    return 1 if failed else 0


def checks() -> Iterator[Check]:
    yield Check("python", sys.version_info >= (3, 11), sys.version.split()[0], "install Python 3.11 or newer")
    for name, least in (("torch", (2, 11)), ("transformers", (5, 17)), ("safetensors", (0, 5))):
        found = package_version(name)
        wanted = ".".join(map(str, least))
        yield Check(
            name,
            found is not None and release(found) >= least,
            found or "not installed",
            f"pip install '{name}>={wanted}'",
        )
    if package_version("torch") is not None:
        yield from _torch_checks()
    yield _localhost()
    free = shutil.disk_usage(".").free / 2**30
    yield Check(
        "free disk space",
        free > 2,
        f"{free:.0f} GiB here",
        "free some space, or train in another directory",
        required=False,
    )


def _torch_checks() -> Iterator[Check]:
    import torch
    import torch.distributed as dist

    available = dist.is_available()
    yield Check(
        "torch.distributed",
        available,
        "available" if available else "missing",
        "install a torch that was built with it",
    )
    if not available:
        return
    gloo = dist.is_gloo_available() and _collective()
    yield Check("gloo", gloo, "runs a collective" if gloo else "missing", "install a torch that was built with gloo")
    yield _attention()
    gpus = torch.cuda.device_count()
    fix = "without one, training runs on the CPU: good for trying things out"
    yield Check("GPUs", gpus > 0, f"{gpus} seen by torch", fix, required=False)
    if gpus:
        nccl, bf16 = dist.is_nccl_available(), torch.cuda.is_bf16_supported()
        yield Check("nccl", nccl, "available" if nccl else "missing", "install a torch that was built with NCCL")
        fix = 'train with precision="fp16" or "fp32"'
        yield Check("bf16 on the GPU", bf16, "supported" if bf16 else "not supported", fix, required=False)
    yield _fp8()


def _attention() -> Check:
    """What enable_flash_attention=True gives a causal model in bf16 with heads of 128 features."""
    from ..attention.choice import choose
    from ..attention.installed import find_installed
    from ..attention.needs import needs_on
    from ..utils.device import get_current_device

    return Check("attention", True, str(choose(needs_on(get_current_device()), find_installed())), "")


def _fp8() -> Check:
    """Whether precision="fp8" works here."""
    from ..precision.fp8 import why_not
    from ..utils.device import get_current_device

    missing = why_not(get_current_device())
    fix = 'train with precision="bf16"; Fp8Options(emulate=True) is for trying the numbers'
    return Check("fp8", missing is None, f"not here: {missing}" if missing else "supported", fix, required=False)


def _collective() -> bool:
    """An all-reduce in a process group of one, so that a broken installation shows here and not in the first
    training run.
    """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.item() == 1.0


def _localhost() -> Check:
    """Ranks of one machine find each other through a port of localhost."""
    try:
        with socket.create_server(("localhost", 0)) as server:
            found, passed = f"port {server.getsockname()[1]} could be opened", True
    except OSError as error:
        found, passed = str(error), False
    return Check(
        "localhost", passed, found, "localhost must resolve (see /etc/hosts) and allow listening, or ranks cannot meet"
    )


def release(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
