"""`shardwright env`: versions and devices, in a form to paste into a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import sys

from .._version import __version__
from ..utils.versions import package_version

HELP = "print versions, devices and backends for a bug report"

PACKAGES = (
    *("torch", "transformers", "safetensors", "numpy", "peft", "datasets"),
    *("deepspeed", "xformers", "flash-attn", "liger-kernel", "triton"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It has no options."""


def run(args: argparse.Namespace) -> int:
    for name, value in report().items():
        print(f"{name:<14} {value}")
    return 0


def report() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    rows = {
        "shardwright": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads",
    }
    rows |= {name: package_version(name) or "not installed" for name in PACKAGES}
    backends = [name for name in ("gloo", "nccl", "mpi") if getattr(dist, f"is_{name}_available")()]
    rows["backends"] = ", ".join(backends) or "none"
    rows["cuda"] = f"{torch.version.cuda or 'torch is built without it'}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows[f"gpu {index}"] = f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, capability {gpu.major}.{gpu.minor}"
    return rows
